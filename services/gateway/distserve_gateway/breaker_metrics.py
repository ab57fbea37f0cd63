"""What the breaker does, as Prometheus sees it."""

import math
from collections.abc import Iterator
from typing import get_args

from prometheus_client.metrics_core import Metric

from distserve_gateway.breaker import STATES, State
from distserve_gateway.families import counter, gauge
from distserve_gateway.trials import Trials

PLACES = ("here", "probe", "fallback", "both", "shed")


class BreakerMetrics:
    def __init__(self) -> None:
        self._placed = dict.fromkeys(PLACES, 0)
        self._changed: dict[State, int] = dict.fromkeys(get_args(State), 0)

    def placed(self, place: str) -> None:
        self._placed[place] += 1

    def changed(self, state: State) -> None:
        self._changed[state] += 1

    def families(self, model: str, trials: Trials) -> Iterator[Metric]:
        named = ("model", model)
        yield counter(
            "distserve_gateway_breaker_requests",
            "Requests by where they went: here, here as a probe, to the fallback, to both (X-First-Token), or refused.",
            named,
            {(place,): times for place, times in self._placed.items()},
            "to",
        )
        yield counter(
            "distserve_gateway_breaker_transitions",
            "Changes of the breaker's state, by the new one.",
            named,
            {(state,): times for state, times in self._changed.items()},
            "to",
        )
        yield gauge(
            "distserve_gateway_breaker_state",
            "0 closed, 1 open, 2 half-open.",
            named,
            {(): STATES[trials.breaker.state]},
        )
        yield gauge(
            "distserve_gateway_breaker_ttft_p99_seconds",
            "P99 of the last second's times to first token, with the waits that are too long already. NaN: none.",
            named,
            {(): math.nan if trials.p99_s is None else trials.p99_s},
        )
