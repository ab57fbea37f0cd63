"""The circuit breaker: whether a new request is served here, by the fallback server, or not at all.

    closed ---- for_s late seconds in a row ----> open ---- open_s ----> half-open ---- num_probes in time ----> closed
                                                    ^                       |
                                                    '--- a probe is late ---'

A late second is one whose P99 of times to first token is over the limit (lateness.py). Open, new requests go to the
fallback server. Where there is none they are refused by class: `batch`, and after another for_s late seconds in a row
`normal` too; `vip` never. Half-open, as many requests are let through as are still wanted in time (those under way
counted), and the others fare as before.

Pure: it sees a clock and verdicts. What has begun to be served is none of its business.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from distserve.config import BreakerConfig
from distserve.errors import Shed
from distserve.messages import Priority
from distserve_gateway.lateness import EVERYBODY

State = Literal["closed", "open", "half_open"]
Place = Literal["here", "probe", "fallback"]

STATES: dict[State, int] = {"closed": 0, "open": 1, "half_open": 2}

RETRY_S = 1.0  # half-open: by then probes have said more

_SHED: tuple[frozenset[Priority], ...] = (frozenset(), frozenset({"batch"}), frozenset({"batch", "normal"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`active`: it may open at all. Without `has_fallback` it sheds."""

    limit_s: float
    for_s: int
    open_s: float
    num_probes: int
    has_fallback: bool
    active: bool

    @classmethod
    def of(cls, config: BreakerConfig) -> "Policy":
        has_fallback = bool(config.fallback_url)
        return cls(
            limit_s=config.ttft_p99_ms / 1000,
            for_s=config.for_s,
            open_s=config.open_s,
            num_probes=config.num_probes,
            has_fallback=has_fallback,
            active=config.mode == "on" or (config.mode == "auto" and has_fallback),
        )


class Breaker:
    """`clock` gives seconds; `on_change` is told the old state, the new one, and why. Both are the same when only the
    classes change that are refused."""

    def __init__(
        self,
        policy: Policy,
        clock: Callable[[], float],
        on_change: Callable[[State, State, str], None] = lambda old, new, reason: None,
    ) -> None:
        self.policy = policy
        self.reason = ""  # of the last change, in words
        self.period = 0  # counts the times it was half-open: a verdict of an older one is none
        self._clock = clock
        self._on_change = on_change
        self._state: State = "closed"
        self._since = 0.0
        self._num_late = 0  # seconds in a row
        self._level = 0  # of _SHED
        self._num_probing = 0
        self._num_good = 0

    @property
    def state(self) -> State:
        if self._state == "open" and self._clock() - self._since >= self.policy.open_s:
            self.period += 1
            self._num_probing = self._num_good = 0
            num = self.policy.num_probes
            self._go("half_open", f"open for {self.policy.open_s:g} s, {num} in time close it")
        return self._state

    @property
    def falls_back(self) -> bool:
        """New requests are served, whatever is wrong here: probes aside."""
        return self.policy.has_fallback and self.state != "closed"

    @property
    def shed(self) -> frozenset[Priority]:
        """Classes that are refused now, unless they are let through as probes."""
        return frozenset() if self.policy.has_fallback else _SHED[self._level]

    @property
    def counted(self) -> frozenset[Priority]:
        """Classes whose first tokens make a second late. Those that are refused say nothing about who is still
        served: what was accepted of them earlier waits, and should."""
        return EVERYBODY - self.shed

    def place(self, priority: Priority, *, keep_here: bool = False) -> Place:
        """Where a new request goes. `keep_here`: the fallback can't serve it, or must not. A probe must get its verdict
        by probed(), with the `period` of this moment. Raises Shed."""
        state = self.state
        if state == "closed":
            return "here"
        if state == "half_open" and self._num_probing + self._num_good < self.policy.num_probes:
            self._num_probing += 1
            return "probe"
        if self.policy.has_fallback:
            return "here" if keep_here else "fallback"
        if priority in self.shed:
            retry_after_s = self._since + self.policy.open_s - self._clock() if state == "open" else RETRY_S
            raise Shed(
                f"first tokens are late just now, requests of priority {priority!r} are refused: try again in "
                f"{math.ceil(retry_after_s)} s",
                priority=priority,
                retry_after_s=retry_after_s,
            )
        return "here"

    def second(self, p99_s: float | None) -> None:
        """A second has passed, with this P99 of times to first token (Lateness.second)."""
        state = self.state
        if p99_s is None or p99_s <= self.policy.limit_s:
            self._num_late = 0
            return
        self._num_late += 1
        if not self.policy.active or self._num_late < self.policy.for_s:
            return
        self._num_late = 0
        limit = f"over {self.policy.limit_s * 1000:g} ms for {self.policy.for_s} s"
        if state == "closed":
            self._level = 1
            self._go("open", f"the P99 of times to first token is {_ms(p99_s)}, {limit}")
        elif self._level == 1 and not self.policy.has_fallback:
            self._level = 2
            self.reason = f"the P99 of times to first token is still {_ms(p99_s)}, {limit}"
            self._on_change(state, state, self.reason)

    def probed(self, period: int, in_time: bool | None) -> None:
        """A probe's verdict; None: there is none, another may be sent in its place."""
        if self.state != "half_open" or period != self.period:
            return
        self._num_probing -= 1
        if in_time is None:
            return
        if not in_time:
            self._num_late = 0
            self._go("open", f"a request that was let through had no first token in {self.policy.limit_s * 1000:g} ms")
            return
        self._num_good += 1
        if self._num_good >= self.policy.num_probes:
            self._num_late = self._level = 0
            self._go("closed", f"{self._num_good} requests that were let through had their first tokens in time")

    def describe(self) -> str:
        """What is not as usual, for people; empty: nothing."""
        state = self.state
        if state == "closed":
            return ""
        if self.policy.has_fallback:
            others = "new requests go to the fallback server"
        else:
            others = f"new requests of class {' and '.join(sorted(self.shed))} are refused"
        but = f", but for {self.policy.num_probes} that try it here" if state == "half_open" else ""
        return f"the breaker is {state.replace('_', '-')}: {self.reason}; {others}{but}"

    def _go(self, state: State, reason: str) -> None:
        old, self._state = self._state, state
        self._since = self._clock()
        self.reason = reason
        self._on_change(old, state, reason)


def _ms(seconds: float) -> str:
    return "without end" if seconds == math.inf else f"{seconds * 1000:.0f} ms"
