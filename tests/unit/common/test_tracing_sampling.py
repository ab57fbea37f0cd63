"""Who decides that a trace is exported, and how."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

from distserve.telemetry.sampling import RequestSampler

SAMPLED, NOT_SAMPLED = Decision.RECORD_AND_SAMPLE, Decision.RECORD_ONLY
HALF = 1 << 63  # of the lower 64 bits of a trace id


def parent(flags: int, *, remote: bool) -> Context:
    return set_span_in_context(NonRecordingSpan(SpanContext(1, 1, remote, TraceFlags(flags))), Context())


def decide(sampler: RequestSampler, context: Context | None, trace_id: int, kind: SpanKind) -> Decision:
    return sampler.should_sample(context, trace_id, "s", kind).decision


@pytest.mark.parametrize(
    ("context", "kind", "trace_id", "expected"),
    [
        (None, SpanKind.SERVER, HALF - 1, SAMPLED),
        (None, SpanKind.SERVER, HALF, NOT_SAMPLED),
        (None, SpanKind.INTERNAL, HALF, NOT_SAMPLED),
        # A caller that samples is followed, one that does not leaves it to the ratio.
        (parent(1, remote=True), SpanKind.SERVER, HALF, SAMPLED),
        (parent(3, remote=True), SpanKind.SERVER, HALF, SAMPLED),
        (parent(0, remote=True), SpanKind.SERVER, HALF, NOT_SAMPLED),
        (parent(2, remote=True), SpanKind.SERVER, HALF, NOT_SAMPLED),
        (parent(0, remote=True), SpanKind.SERVER, HALF - 1, SAMPLED),
        # All others go by their parent.
        (parent(0, remote=True), SpanKind.CONSUMER, HALF - 1, NOT_SAMPLED),
        (parent(1, remote=True), SpanKind.CONSUMER, HALF, SAMPLED),
        (parent(0, remote=False), SpanKind.CLIENT, HALF - 1, NOT_SAMPLED),
        (parent(1, remote=False), SpanKind.INTERNAL, HALF, SAMPLED),
    ],
)
def test_who_decides(context: Context | None, kind: SpanKind, trace_id: int, expected: Decision) -> None:
    assert decide(RequestSampler(0.5, records_all=True), context, trace_id, kind) is expected


def test_what_is_not_sampled_is_recorded_only_where_failures_are_kept() -> None:
    assert decide(RequestSampler(0, records_all=False), None, 0, SpanKind.SERVER) is Decision.DROP
    assert decide(RequestSampler(0, records_all=True), None, 0, SpanKind.SERVER) is Decision.RECORD_ONLY


def test_a_kept_trace_is_sampled_from_then_on() -> None:
    sampler = RequestSampler(0, records_all=True, is_kept=lambda trace_id: trace_id == 7)
    for context in (None, parent(0, remote=True), parent(0, remote=False)):
        assert decide(sampler, context, 7, SpanKind.CONSUMER) is SAMPLED
        assert decide(sampler, context, 8, SpanKind.CONSUMER) is NOT_SAMPLED


@given(st.integers(0, (1 << 128) - 1), st.floats(0, 1), st.floats(0, 1))
def test_a_trace_of_a_ratio_is_in_every_larger_one(trace_id: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    small, large = (RequestSampler(ratio, records_all=True) for ratio in (low, high))
    if decide(small, None, trace_id, SpanKind.SERVER) is SAMPLED:
        assert decide(large, None, trace_id, SpanKind.SERVER) is SAMPLED
    assert decide(RequestSampler(1, records_all=True), None, trace_id, SpanKind.SERVER) is SAMPLED
    assert decide(RequestSampler(0, records_all=True), None, trace_id, SpanKind.SERVER) is NOT_SAMPLED
