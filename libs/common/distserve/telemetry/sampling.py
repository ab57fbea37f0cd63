"""Which traces are exported whatever becomes of them. Needs the SDK."""

from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

_LOW_BITS = (1 << 64) - 1


class RequestSampler(Sampler):
    """The service that a request enters decides: its span is of kind SERVER, or has no parent. There a caller's sampled
    flag counts, and else the ratio, of the trace id's lower 64 bits, so that all who look at one trace decide alike.
    All others go by their parent's flag.

    ratio: 0 to 1. is_kept(trace_id): it was decided otherwise meanwhile. records_all: what is not sampled is recorded
    all the same.
    """

    def __init__(self, ratio: float, *, records_all: bool, is_kept: Callable[[int], bool] = lambda trace_id: False):
        self._ratio = ratio
        self._bound = round(ratio * (1 << 64))
        self._is_kept = is_kept
        self._otherwise = Decision.RECORD_ONLY if records_all else Decision.DROP

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        parent = get_current_span(parent_context).get_span_context()
        if parent.is_valid and parent.trace_flags.sampled:
            sampled = True
        elif not parent.is_valid or (parent.is_remote and kind is SpanKind.SERVER):
            sampled = trace_id & _LOW_BITS < self._bound or self._is_kept(trace_id)
        else:
            sampled = self._is_kept(trace_id)
        decision = Decision.RECORD_AND_SAMPLE if sampled else self._otherwise
        return SamplingResult(decision, attributes, parent.trace_state if parent.is_valid else trace_state)

    def get_description(self) -> str:
        return f"RequestSampler({self._ratio:g})"
