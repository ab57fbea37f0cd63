"""The spans of this process, as they begin and end: for tests that end no process and need no receiver.

with collected() as spans:
    ...
    assert not spans.open
    [lease] = spans.named("lease")
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan

from distserve.telemetry import tracing


class Spans(SpanProcessor):
    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        self._ended: list[ReadableSpan] = []

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        self._open[span.get_span_context().span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        assert context is not None
        del self._open[context.span_id]  # KeyError: it has ended before
        self._ended.append(span)

    @property
    def open(self) -> list[str]:
        """Names of those that have not ended."""
        return list(self._open.values())

    @property
    def names(self) -> list[str]:
        """Of those that have, in the order of their ends."""
        return [span.name for span in self._ended]

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of that name that have ended."""
        return [span for span in self._ended if span.name == name]

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """Its children that have ended."""
        return [span for span in self._ended if span.parent is not None and span.parent.span_id == id_of(parent)]


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def links_of(span: ReadableSpan) -> list[int]:
    """The ids of the spans that it links to."""
    return [link.context.span_id for link in span.links]


def seconds_of(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


@contextmanager
def collected() -> Iterator[Spans]:
    """Traces are on inside: everything is recorded, and goes nowhere else."""
    spans, provider = Spans(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(spans)
    assert tracing._tracer is None, "traces are on already"
    tracing._tracer = provider.get_tracer("test")
    tracing._wall_minus_monotonic_ns = time.time_ns() - time.monotonic_ns()
    try:
        yield spans
    finally:
        tracing._tracer = None
