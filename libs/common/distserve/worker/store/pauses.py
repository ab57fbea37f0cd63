"""Leaving out whoever fails, for a while that doubles."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

FIRST_S = 1.0
MAX_S = 30.0

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class _Pause:
    lasts_s: float
    until: float
    tried: bool = False  # somebody has begun to try it again, and nothing is known of that yet


class Pauses(Generic[Key]):
    """Who has failed is in a pause, `key in pauses`: FIRST_S at first. When it is over one may try, trying(), and for
    the others it goes on; if that fails it lasts twice as long as before, up to MAX_S; if not it is forgotten.

        failed      trying   failed                  trying   succeeded
          |-- 1 s --|- … ----|-------- 2 s ----------|- … ----|
    """

    def __init__(self, *, try_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """try_s: a try's longest time. One of which nothing is heard by then has not happened."""
        self._try_s = try_s
        self._now = now
        self._pauses: dict[Key, _Pause] = {}

    def __len__(self) -> int:
        """Those that have failed and not succeeded since."""
        return len(self._pauses)

    def __contains__(self, key: Key) -> bool:
        pause = self._pauses.get(key)
        return pause is not None and self._now() < pause.until

    @property
    def next_end(self) -> float:
        """When the next of them ends, by the clock that was given; inf if there is none."""
        now = self._now()
        return min((pause.until for pause in self._pauses.values() if now < pause.until), default=math.inf)

    def trying(self, key: Key) -> bool:
        """The caller is about to. True if it tries again what has failed: then the others leave it out meanwhile."""
        pause, now = self._pauses.get(key), self._now()
        if pause is None or now < pause.until:
            return False
        pause.until, pause.tried = now + max(pause.lasts_s, self._try_s), True
        return True

    def failed(self, key: Key) -> None:
        pause, now = self._pauses.get(key), self._now()
        if pause is None:
            self._pauses[key] = _Pause(FIRST_S, now + FIRST_S)
        elif pause.tried or now >= pause.until:  # else it had been begun before it was known
            pause.lasts_s = min(2 * pause.lasts_s, MAX_S)
            pause.until, pause.tried = now + pause.lasts_s, False

    def succeeded(self, key: Key) -> bool:
        """True if it had failed before."""
        return self._pauses.pop(key, None) is not None

    def forget(self, gone: Callable[[Key], bool]) -> None:
        for key in [key for key in self._pauses if gone(key)]:
            del self._pauses[key]
