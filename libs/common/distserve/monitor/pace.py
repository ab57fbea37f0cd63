"""An interval apart: asking, and bearing with a server that is away."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from distserve.errors import Unavailable

T = TypeVar("T")


class Pace:
    """`for _ in pace:` begins at once, then every `interval_s`, or only once. What is missed is not made up for."""

    def __init__(self, interval_s: float, once: bool = False) -> None:
        self._interval_s = interval_s
        self._once = once
        self._away = False

    def __iter__(self) -> Iterator[None]:
        due = time.monotonic()
        while True:
            yield
            if self._once:
                return
            due = max(due + self._interval_s, time.monotonic())
            time.sleep(due - time.monotonic() if due > time.monotonic() else 0)

    def tried(self, ask: Callable[[], T]) -> T | None:
        """What it answers; None if the server is away, which standard error is told once for each time it is. With
        `once` there is no next time: Unavailable is raised then, as everything else is."""
        try:
            answer = ask()
        except Unavailable as e:
            if self._once:
                raise
            if not self._away:
                print(f"distserve: {e.message}; trying again", file=sys.stderr, flush=True)
            self._away = True
            return None
        if self._away:
            print("distserve: it answers again", file=sys.stderr, flush=True)
        self._away = False
        return answer
