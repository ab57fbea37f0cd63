"""What the gateway counts, in a Prometheus registry of its own: numbers here, their names in families.py.

Counts are of requests, tokens and sequences. Belongs to the event loop; a token costs one look-up and an addition.
"""

from asyncio import CancelledError
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from distserve.api_keys import PRIORITIES
from distserve.errors import DistServeError
from distserve.messages import Priority
from distserve.worker.histogram import Histogram
from distserve_gateway.attainment import Attained, is_refusal
from distserve_gateway.ended import Ended
from distserve_gateway.families import gateway_families
from distserve_gateway.route import Kind
from distserve_gateway.spread import REQUEST_S, TOKEN_S, Spread
from distserve_gateway.troubles import Troubles

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STAGES = ("queue", "prefill", "transfer", "decode")
TOKENS = tuple(float(digit * 10**zeros) for zeros in range(7) for digit in (1, 2, 5))
MAX_RECENT = 100_000  # first tokens of a second


@dataclass(slots=True)
class ClassCounts:
    """Requests of one priority that ended: each is refused, or one of yes, no and unpromised. Those that ended well
    within every promise are good, too."""

    yes: int = 0
    no: int = 0
    unpromised: int = 0
    good: int = 0
    refused: int = 0

    def count(self, attained: Attained) -> None:
        setattr(self, attained, getattr(self, attained) + 1)

    @property
    def num(self) -> int:
        return self.yes + self.no + self.unpromised + self.refused


class Metrics:
    def __init__(self, model: str, num_live: Callable[[], int]) -> None:
        self.model = model
        self.num_live = num_live
        self.troubles = Troubles()
        self.ttft = Spread(REQUEST_S)
        self.itl = Spread(TOKEN_S)
        # gap(seconds, num_tokens), for each token: those that came together share the gap before them.
        self.gap = self.itl.share
        self.tpot = Spread(TOKEN_S)
        self.e2e = Spread(REQUEST_S)
        self.stages = {stage: Spread(REQUEST_S) for stage in STAGES}
        self.prompt_lengths = Histogram(TOKENS)
        self.output_lengths = Histogram(TOKENS)
        self.classes: dict[Priority, ClassCounts] = {priority: ClassCounts() for priority in PRIORITIES}
        self.requests: Counter[tuple[str, ...]] = Counter()  # by kind, and outcome
        self.routes: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        self.late = {"gateway": 0, "worker": 0}
        self.retries: Counter[str] = Counter()
        self.finish_reasons = Counter(stop=0, length=0, abort=0, error=0)  # of outputs; the last two: early
        self.num_started = 0
        self.num_ended = 0
        self.num_failed = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_looked_up_tokens = 0  # of those: not of what was turned away, or served by the fallback server
        self.num_cached_tokens = 0  # of these
        self.recent_ttfts: deque[float] = deque(maxlen=MAX_RECENT)  # for who empties it each second
        self._num_with_first = 0  # tokens that came together with an output's first
        self.registry = CollectorRegistry()
        self.show(lambda: gateway_families(self))

    def show(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """More, asked for at each scrape."""
        self.registry.register(_Asked(collect))

    @property
    def num_tokens(self) -> int:
        """Output tokens that have come, also of what has not ended yet."""
        return self.ttft.num + self._num_with_first + self.itl.num

    # ------------------------------------------------------------ what happens

    def started(self) -> None:
        """A request has come."""
        self.num_started += 1

    def first_token(self, seconds: float, num_tokens: int = 1) -> None:
        """Of an output, with those that came together with it."""
        self.ttft.observe(seconds)
        self.recent_ttfts.append(seconds)
        self._num_with_first += num_tokens - 1

    def routed(self, kind: Kind) -> None:
        """A sequence was taken."""
        self.routes[kind] += 1

    def retried(self, reason: str) -> None:
        """A sequence is submitted again, since the try before ended with this error's code."""
        self.retries[reason] += 1

    def refused_for_slo(self, asked: bool) -> None:
        """A sequence was refused for its promise; `asked`: a worker was."""
        self.late["worker" if asked else "gateway"] += 1

    def refused(self, kind: str, error: DistServeError, priority: Priority = "normal") -> None:
        """A request that was not let in: it was wrong, or came at a bad time."""
        self.num_ended += 1
        self.requests[kind, error.code] += 1
        if is_refusal(error):
            self.classes[priority].refused += 1

    def dropped(self, kind: str, error: BaseException) -> None:
        """A request that was neither let in nor refused: its client left before, or something here broke."""
        self.num_ended += 1
        is_cancelled = isinstance(error, CancelledError | GeneratorExit)
        self.requests[kind, "cancelled" if is_cancelled else DistServeError.code] += 1

    def ended(self, ended: Ended) -> None:
        """One that was let in."""
        call, of_class = ended.call, self.classes[ended.call.terms.priority]
        self.num_ended += 1
        self.requests[call.kind, ended.outcome] += 1
        self.e2e.observe(ended.e2e_s)
        self.num_prompt_tokens += call.num_prompt_tokens
        self.num_output_tokens += ended.num_output_tokens
        if ended.num_looked_up_tokens:
            self.num_looked_up_tokens += ended.num_looked_up_tokens
            self.num_cached_tokens += ended.num_cached_tokens
        if ended.is_refused:
            of_class.refused += 1
            return
        of_class.count(ended.attained)
        of_class.good += ended.is_good
        for seconds in ended.tpots_s:
            self.tpot.observe(seconds)
        for stage in STAGES:
            if (seconds := getattr(ended.timings, f"{stage}_s")) > 0:
                self.stages[stage].observe(seconds)
        self._finished(ended)
        if ended.is_failed:
            self.num_failed += 1
            self.troubles.failed(call.request_id, ended.error)

    def _finished(self, ended: Ended) -> None:
        self.prompt_lengths.observe(ended.call.num_prompt_tokens)
        self.output_lengths.observe(ended.num_output_tokens)
        for reason in ended.finish_reasons:
            self.finish_reasons[reason] += 1
        num_early = ended.call.num_outputs - len(ended.finish_reasons)
        self.finish_reasons["error" if ended.is_failed else "abort"] += num_early

    def exposition(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)


class _Asked(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()
