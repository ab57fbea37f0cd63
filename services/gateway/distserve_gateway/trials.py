"""Requests on their way to their first token here: each is measured for the breaker, some of them as its probes."""

import asyncio
import logging
import math
import time
from collections.abc import Callable

from distserve.errors import DeadlineExceeded, DistServeError, SloUnattainable
from distserve.messages import Priority
from distserve_gateway.breaker import Breaker, Policy, State
from distserve_gateway.lateness import Lateness, Wait

log = logging.getLogger(__name__)

SECOND_S = 1.0


class Trial:
    """One request's; what comes after its first token, or its end, changes nothing. This one is nobody's."""

    __slots__ = ()

    def first_token(self) -> None:
        """Of any of its outputs."""

    def failed(self, error: DistServeError) -> None:
        """It ended with an error: if that is our fault, no first token will ever come. left() follows."""

    def left(self) -> None:
        """It has ended. Before its first token that is its client's doing, and no verdict."""


UNTRIED = Trial()


class _Trial(Trial):
    """`period`: of the breaker, if it is a probe; else 0."""

    __slots__ = ("_open", "_trials", "period", "wait")

    def __init__(self, trials: "Trials", wait: Wait, period: int) -> None:
        self._trials = trials
        self._open = True
        self.wait = wait
        self.period = period

    def first_token(self) -> None:
        if self._open:
            self._open = False
            self._trials.ended(self, self._trials.waited_s(self))

    def failed(self, error: DistServeError) -> None:
        if not self._open:
            return
        overdue = error.fields.get("overdue")
        # A deadline is its client's: at most a wait that was too long, which each second has seen.
        if overdue or (error.http_status >= 500 and not isinstance(error, DeadlineExceeded)):
            self._open = False
            self._trials.ended(self, math.inf)
        elif isinstance(error, SloUnattainable) and overdue is None and error.fields.get("retry_after_s") is not None:
            self._open = False
            self._trials.refused(self)

    def left(self) -> None:
        if self._open:
            self._open = False
            self._trials.dropped(self)


class Trials:
    """Belongs to the event loop, with its breaker. `on_change` is told of every new state; run() ends the seconds."""

    def __init__(
        self,
        policy: Policy,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[State], None] = lambda state: None,
    ) -> None:
        self.breaker = Breaker(policy, clock, self._changed)
        self.p99_s: float | None = None  # of the last second
        self._clock = clock
        self._on_change = on_change
        self._lateness = Lateness(policy.limit_s)
        self._probes: dict[_Trial, None] = {}  # without a verdict

    def begin(self, received_at: float, priority: Priority, *, probe: bool = False) -> Trial:
        """Of a request that is to be served here. `received_at` by the clock."""
        trial = _Trial(self, self._lateness.begin(received_at, priority), self.breaker.period if probe else 0)
        if probe:
            self._probes[trial] = None
        return trial

    def waited_s(self, trial: _Trial) -> float:
        return self._clock() - trial.wait.began

    def ended(self, trial: _Trial, waited_s: float) -> None:
        self._lateness.end(trial.wait, waited_s)
        self._judge(trial, waited_s <= self.breaker.policy.limit_s)

    def refused(self, trial: _Trial) -> None:
        """For its promise, since others wait before it: no lateness, but a probe has found no room."""
        self._lateness.drop(trial.wait)
        self._judge(trial, False)

    def dropped(self, trial: _Trial) -> None:
        self._lateness.drop(trial.wait)
        self._judge(trial, False if self.waited_s(trial) > self.breaker.policy.limit_s else None)

    def second(self) -> None:
        """One has passed. A probe that waits for too long is late now, not only when its token comes."""
        self.p99_s = self._lateness.second(self._clock(), self.breaker.counted)
        self.breaker.second(self.p99_s)
        for trial in [p for p in self._probes if self.waited_s(p) > self.breaker.policy.limit_s]:
            self._judge(trial, False)

    async def run(self) -> None:
        """Until cancelled. A second that the event loop slept through is one with the next."""
        due = self._clock() + SECOND_S
        while True:
            await asyncio.sleep(max(0.0, due - self._clock()))
            self.second()
            due = max(due, self._clock()) + SECOND_S

    def _judge(self, trial: _Trial, in_time: bool | None) -> None:
        if trial in self._probes:
            del self._probes[trial]
            self.breaker.probed(trial.period, in_time)

    def _changed(self, old: State, new: State, reason: str) -> None:
        refused = ", ".join(sorted(self.breaker.shed))
        log.warning("the breaker is %s, was %s: %s; refused: %s", new, old, reason, refused or "nobody")
        if new == old:
            return
        if new == "closed":
            self._lateness.forget()
        self._on_change(new)
