"""How a tier fares: what has been done in it, how long that took, and why it is not used at the moment."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from distserve.errors import DistServeError
from distserve.messages import Tier
from distserve.worker.histogram import Histogram, bounds_between

log = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Literal["read", "write"]

LATENCY_S = bounds_between(0.0001, 60.0)  # bounds of what a call, a lookup and a fetch take
STUCK_S = 2.0  # a call that takes longer than this: the tier is left alone until it returns
_PAUSE_S = (1.0, 30.0)  # after a failed operation of a kind: the first pause, doubled each time, and the longest


@dataclass(slots=True)
class _Pause:
    """After failures of one operation. A single success ends it."""

    num_failures: int = 0
    until: float = 0.0
    why: str = ""


class Call:
    """One call that blocks. The time that it waits for a thread is not the tier's."""

    def __init__(self, kind: Operation, clock: Callable[[], float], began: float | None) -> None:
        self.kind = kind
        self.began = began
        self._clock = clock

    def timed(self, job: Callable[[], T]) -> Callable[[], T]:
        """`job`, for the thread that runs it: its time begins there."""

        def run() -> T:
            self.began = self._clock()
            return job()

        return run

    @property
    def took_s(self) -> float:
        return 0.0 if self.began is None else self._clock() - self.began


class TierState:
    """Belongs to the event loop. A disk that hangs, is full or fails costs what lies there, never the service: while
    `trouble(operation)` says something, nobody begins that operation here, but for one try after each pause."""

    def __init__(
        self,
        tier: Tier,
        *,
        capacity_bytes: int = 0,
        stuck_s: float = STUCK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self.num_hits = 0
        self.num_read = 0
        self.num_written = 0
        self.num_evicted: Counter[str] = Counter()  # by reason
        self.num_errors = 0
        self.latency: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(LATENCY_S))
        self.broken = ""  # it could not be opened at all
        self.no_room = ""  # why nothing may be written, whatever goes; what is there is read all the same
        self.stuck_s = stuck_s
        self._clock = clock
        self._under_way: set[Call] = set()
        self._pauses: dict[str, _Pause] = {"read": _Pause(), "write": _Pause()}
        self._said = ""

    @contextmanager
    def operation(self, kind: Operation, *, queued: bool = False) -> Iterator[Call]:
        """Round one call that blocks. Failures are counted and passed on. queued: it waits for a thread first, and
        begins with Call.timed()."""
        with self.watched(kind, queued=queued) as call:
            try:
                yield call
            except (DistServeError, OSError) as e:
                self.failed(kind, e)
                raise
            self._pauses[kind] = _Pause()
            self.latency[kind].observe(call.took_s)

    @contextmanager
    def watched(self, kind: Operation, *, queued: bool = False) -> Iterator[Call]:
        """As operation(), for what only must come back: how it ends says nothing about the next one."""
        call = Call(kind, self._clock, None if queued else self._clock())
        self._under_way.add(call)
        try:
            yield call
        finally:
            self._under_way.remove(call)
            self.say()

    def failed(self, kind: Operation, error: Exception) -> None:
        pause = self._pauses[kind]
        self.num_errors += 1
        pause.num_failures += 1
        pause.why = str(error) or type(error).__name__
        first, longest = _PAUSE_S
        pause.until = self._clock() + min(longest, first * 2.0 ** min(pause.num_failures - 1, 16))

    def try_again(self, kind: Operation) -> None:
        """What made it fail the last time may be over: no pause before the next one, and none the longer after it."""
        pause = self._pauses[kind]
        pause.until = 0.0
        pause.num_failures = max(min(1, pause.num_failures), pause.num_failures - 1)

    def trouble(self, kind: Operation) -> str:
        """Why this operation should not be begun now; empty: it may."""
        return self.resting(kind) or (self.no_room if kind == "write" else "")

    def resting(self, kind: Operation) -> str:
        """As trouble(), for what needs no room."""
        if self.broken:
            return self.broken
        if stuck := self._stuck():
            return stuck
        pause = self._pauses[kind]
        return pause.why if self._clock() < pause.until else ""

    def failing(self, kind: Operation) -> bool:
        """The last one did not work, or does not come back, or none can: whether or not another may be tried now."""
        return bool(self.trouble(kind) or self._pauses[kind].num_failures)

    @property
    def state(self) -> str:
        """ "ok", or what is wrong, for people: also in a pause's last moment, when another try is allowed."""
        if self.broken:
            return self.broken
        if stuck := self._stuck():
            return stuck
        failing = [f"{kind}s fail: {p.why}" for kind, p in self._pauses.items() if p.num_failures]
        return "; ".join(failing + [self.no_room] * bool(self.no_room)) or "ok"

    @property
    def reasons(self) -> list[str]:
        return [] if self.state == "ok" else [f"{self.tier}: {self.state}"]

    def say(self) -> None:
        """Log the state when it has changed. Times in it are left out: they change always."""
        kind = self.state.partition(" for ")[0]
        if kind == self._said or (kind == "ok" and not self._said):
            return
        if kind == "ok":
            log.warning("the %s tier works again", self.tier)
            self._said = ""
        else:
            log.warning("the %s tier is in trouble, the store goes on without: %s", self.tier, self.state)
            self._said = kind

    def _stuck(self) -> str:
        call = max(self._under_way, key=lambda c: c.took_s, default=None)
        if call is None or call.took_s <= self.stuck_s:
            return ""
        return f"a {call.kind} has not come back for {call.took_s:.0f} s"
