"""Asks a gateway again and again, on a thread of its own, so that keys are never held up by a server that is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from distserve.errors import DistServeError, Forbidden, Unauthorized
from distserve.monitor.source import Source
from distserve.status import ClusterStatus


@dataclass(frozen=True, slots=True)
class View:
    """The last picture, and how it stands with the server."""

    status: ClusterStatus | None = None
    taken_at: float = 0.0  # monotonic: when it came
    trouble: str = ""  # why no newer one came; empty: it is the newest
    refused: DistServeError | None = None  # it will not be otherwise later: no key, or a wrong one


class Watching:
    """Asks every `interval_s` while inside. `changed` is called on the thread after each answer."""

    def __init__(self, source: Source, interval_s: float, changed: Callable[[], None]) -> None:
        self._source = source
        self._interval_s = interval_s
        self._changed = changed
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watching", daemon=True)
        self.view = View()  # replaced as a whole, by the thread

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        """Does not wait for an answer that is under way."""
        self._leave.set()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._leave.is_set():
            self._ask()
            if self._leave.is_set():
                return
            self._changed()
            due = max(due + self._interval_s, time.monotonic())  # what is missed is not made up for
            self._leave.wait(due - time.monotonic())

    def _ask(self) -> None:
        last = self.view
        try:
            status = self._source.status()
        except (Unauthorized, Forbidden) as e:
            self.view = View(last.status, last.taken_at, e.message, e)
        except DistServeError as e:
            self.view = View(last.status, last.taken_at, e.message)
        else:
            self.view = View(status, time.monotonic())
