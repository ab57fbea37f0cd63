"""The gateway's Prometheus metrics, in a registry of its own. Counts are of requests, tokens and sequences."""

from collections.abc import Callable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from distserve_gateway.calls import Call
from distserve_gateway.histogram import Histogram
from distserve_gateway.kv_index import KVIndex
from distserve_gateway.route import Kind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)


class Metrics:
    """Each label value is bound once: an observation on the token path costs a fraction of a microsecond."""

    def __init__(self, model: str, num_live: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        labels = {"model": model}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, labels, buckets)
            self.registry.register(made)
            return made

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model"], registry=self.registry).labels(**labels)

        self._ttft = histogram("distserve_gateway_ttft_seconds", "Request received to first token.", _TTFT_BUCKETS)
        self._itl = histogram("distserve_gateway_itl_seconds", "Gap between two tokens of an output.", _ITL_BUCKETS)
        self._e2e = histogram("distserve_gateway_e2e_seconds", "Request received to its end.", _E2E_BUCKETS)
        self._prompt_tokens = counter("distserve_gateway_prompt_tokens", "Prompt tokens of requests that ended.")
        self._output_tokens = counter("distserve_gateway_output_tokens", "Output tokens of requests that ended.")
        self._cached_tokens = counter("distserve_gateway_cached_tokens", "Of the prompt tokens those not computed.")
        routes = Counter(
            "distserve_gateway_routes",
            "Sequences taken: by a pair of workers, a decode worker that prefills itself since it holds most (local), "
            "since prefill is behind (spill) or there is none (alone), or a colocated one.",
            ["model", "kind"],
            registry=self.registry,
        )
        self._routes: dict[Kind, Counter] = {kind: routes.labels(model, kind) for kind in get_args(Kind)}
        late = Counter(
            "distserve_gateway_slo_refusals",
            "Sequences refused since their first token would be late: by the gateway at once, or by all workers asked.",
            ["model", "by"],
            registry=self.registry,
        )
        self._late = {asked: late.labels(model, "worker" if asked else "gateway") for asked in (False, True)}
        self._requests = Counter(
            "distserve_gateway_requests",
            "Requests that ended, by kind and outcome (ok, cancelled, or an error's code).",
            ["model", "kind", "outcome"],
            registry=self.registry,
        )
        live = Gauge("distserve_gateway_live_sequences", "Sequences that run now.", ["model"], registry=self.registry)
        live.labels(**labels).set_function(num_live)
        self._model = model

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def gap(self, seconds: float, num_tokens: int) -> None:
        """Tokens that came together share the gap: each is as far from its neighbour as the mean."""
        self._itl.observe(seconds / num_tokens, num_tokens)

    def routed(self, kind: Kind) -> None:
        """A sequence was taken."""
        self._routes[kind].inc()

    def late(self, asked: bool) -> None:
        """A sequence was refused for its promise; `asked`: a worker was."""
        self._late[asked].inc()

    def watch_index(self, index: KVIndex, num_snapshots: Callable[[], int]) -> None:
        """Show what routing knows of the workers' blocks."""
        for name, text, value in (
            ("kv_hints", "Blocks of workers that routing knows of.", lambda: index.num_hints),
            ("kv_hints_dropped", "Blocks of workers that routing forgot for want of room.", lambda: index.num_dropped),
            ("kv_snapshots", "Lists of all that a worker holds, taken over.", num_snapshots),
        ):
            gauge = Gauge(f"distserve_gateway_{name}", text, ["model"], registry=self.registry)
            gauge.labels(self._model).set_function(value)

    def ended(
        self, call: Call, outcome: str, seconds: float, num_output_tokens: int, num_cached_tokens: int = 0
    ) -> None:
        self._requests.labels(self._model, call.kind, outcome).inc()
        self._e2e.observe(seconds)
        self._prompt_tokens.inc(call.num_prompt_tokens)
        self._output_tokens.inc(num_output_tokens)
        self._cached_tokens.inc(num_cached_tokens)

    def refused(self, kind: str, code: str) -> None:
        """A request that failed validation."""
        self._requests.labels(self._model, kind, code).inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)
