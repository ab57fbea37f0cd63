"""Turns on one machine: measurements that want it for themselves, and work that may go on beside other work."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_S = 90.0  # after this long, others get their turn


class Turns:
    """By a lock file (flock) that other programs may take too; without one, nothing is waited for."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @contextmanager
    def alone(self) -> Iterator[Callable[[], None]]:
        """For measurements: nobody else who keeps to the lock works meanwhile. Gives a function to call between two
        of them, which lets others have a turn if this one has lasted long."""
        if self._path is None:
            yield lambda: None
            return
        with self._path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            began = time.monotonic()

            def breathe() -> None:
                nonlocal began
                if time.monotonic() - began > LONGEST_S:
                    fcntl.flock(lock, fcntl.LOCK_UN)
                    time.sleep(0.01)  # who waits in the kernel is woken before we ask again
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    began = time.monotonic()

            yield breathe

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        """For work that burns CPU and is not measured."""
        if self._path is None:
            yield
            return
        with self._path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield
