"""What the breaker does, as Prometheus sees it."""

import math
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from distserve_gateway.breaker import STATES, State
from distserve_gateway.trials import Trials

PLACES = ("here", "probe", "fallback", "both", "shed")


class BreakerMetrics:
    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(f"distserve_gateway_breaker_{name}", text, ["model", label], registry=registry)

        requests = counter(
            "requests",
            "Requests by where they went: here, here as a probe, to the fallback, to both (X-First-Token), or refused.",
            "to",
        )
        transitions = counter("transitions", "Changes of the breaker's state, by the new one.", "to")
        self._requests = {place: requests.labels(model, place) for place in PLACES}
        self._transitions: dict[State, Counter] = {s: transitions.labels(model, s) for s in get_args(State)}
        self._registry = registry
        self._model = model

    def placed(self, place: str) -> None:
        self._requests[place].inc()

    def changed(self, state: State) -> None:
        self._transitions[state].inc()

    def watch(self, trials: Trials) -> None:
        """Show its state."""
        for name, text, value in (
            ("state", "0 closed, 1 open, 2 half-open.", lambda: STATES[trials.breaker.state]),
            (
                "ttft_p99_seconds",
                "P99 of the last second's times to first token, with the waits that are too long already. NaN: none.",
                lambda: math.nan if trials.p99_s is None else trials.p99_s,
            ),
        ):
            gauge = Gauge(f"distserve_gateway_breaker_{name}", text, ["model"], registry=self._registry)
            gauge.labels(self._model).set_function(value)
