"""Spans of traces outside the ratio, held until it is known whether they are kept. Needs the SDK.

a span ends ──> sampled, or of a kept trace ──> exported
            └─> held, with the others of its trace:

    open    a span of it has begun here and not ended
    idle    none has: forgotten `hold_s` later, and the oldest first where there are too many
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import SpanContext, TraceFlags

MAX_TRACES = 4096
MAX_SPANS = 16_384  # of all: some 4 KB each
MAX_SPANS_OF_ONE = 1024


@dataclass(slots=True)
class _Trace:
    num_open: int = 0
    spans: list[ReadableSpan] = field(default_factory=list)
    idle_since: float = 0.0


class HeldSpans(SpanProcessor):
    """In front of the processor that exports, and owns it. Of any thread."""

    def __init__(
        self,
        exported: SpanProcessor,
        hold_s: float,
        *,
        max_traces: int = MAX_TRACES,
        max_spans: int = MAX_SPANS,
        max_spans_of_one: int = MAX_SPANS_OF_ONE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exported = exported
        self._hold_s = hold_s
        self._max_traces = max_traces
        self._max_spans = max_spans
        self._max_spans_of_one = max_spans_of_one
        self._clock = clock
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Trace] = OrderedDict()
        self._idle: OrderedDict[int, _Trace] = OrderedDict()  # by when they became so
        self._kept: OrderedDict[int, float] = OrderedDict()  # and since when
        self.num_held = 0

    @property
    def num_traces(self) -> int:
        return len(self._open) + len(self._idle)

    def is_kept(self, trace_id: int) -> bool:
        return trace_id in self._kept

    def keep(self, trace_ids: Iterable[int]) -> None:
        """Export what is held of them, and what ends yet: until nothing of it has been open here for hold_s."""
        found: list[ReadableSpan] = []
        with self._lock:
            now = self._clock()
            self._forget_old(now)
            for trace_id in trace_ids:
                self._kept.pop(trace_id, None)
                self._kept[trace_id] = now
                found += self._forget(trace_id)
            while len(self._kept) > self._max_traces:
                self._kept.popitem(last=False)
        for span in found:
            self._exported.on_end(_sampled(span))

    def let_go(self, trace_id: int) -> None:
        """Forget it, unless something of it is open."""
        with self._lock:
            if trace_id in self._idle:
                self._forget(trace_id)

    # ------------------------------------------------------------ as the SDK calls it

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        context = span.get_span_context()
        if context.trace_flags.sampled:
            return
        with self._lock:
            found = self._open.get(context.trace_id)
            if found is None:
                found = self._open[context.trace_id] = self._idle.pop(context.trace_id, _Trace())
                while self.num_traces > self._max_traces:
                    self._forget_oldest()
            found.num_open += 1

    def on_end(self, span: ReadableSpan) -> None:
        context = span.context
        if context is None:
            return
        if not context.trace_flags.sampled:
            with self._lock:
                now = self._clock()
                self._forget_old(now)
                kept = context.trace_id in self._kept
                if kept:
                    self._renew(context.trace_id, now)
                else:
                    self._hold(context.trace_id, span)
                self._close(context.trace_id, now)
            if not kept:
                return
            span = _sampled(span)
        self._exported.on_end(span)

    def shutdown(self) -> None:
        self._exported.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exported.force_flush(timeout_millis)

    # ------------------------------------------------------------ under the lock

    def _hold(self, trace_id: int, span: ReadableSpan) -> None:
        found = self._open.get(trace_id)
        if found is None or len(found.spans) >= self._max_spans_of_one:
            return  # its trace was one too many, or it is
        found.spans.append(span)
        self.num_held += 1
        while self.num_held > self._max_spans:
            self._forget_oldest()

    def _close(self, trace_id: int, now: float) -> None:
        found = self._open.get(trace_id)
        if found is None:
            return
        found.num_open -= 1
        if found.num_open <= 0:
            del self._open[trace_id]
            if found.spans:
                found.idle_since = now
                self._idle[trace_id] = found

    def _forget(self, trace_id: int) -> list[ReadableSpan]:
        """What was held of it. An open one stays so."""
        found = self._idle.pop(trace_id) if trace_id in self._idle else self._open.get(trace_id)
        if found is None:
            return []
        spans, found.spans = found.spans, []
        self.num_held -= len(spans)
        return spans

    def _forget_oldest(self) -> None:
        """Where all are open, the one that has been so for longest."""
        where = self._idle or self._open
        _, found = where.popitem(last=False)
        self.num_held -= len(found.spans)

    def _forget_old(self, now: float) -> None:
        while self._idle and next(iter(self._idle.values())).idle_since + self._hold_s < now:
            self._forget_oldest()
        while self._kept:
            trace_id, since = next(iter(self._kept.items()))
            if since + self._hold_s >= now:
                break
            if trace_id in self._open:
                self._renew(trace_id, now)
            else:
                del self._kept[trace_id]

    def _renew(self, trace_id: int, now: float) -> None:
        self._kept[trace_id] = now
        self._kept.move_to_end(trace_id)


def _sampled(span: ReadableSpan) -> ReadableSpan:
    """The same with its sampled flag set: what exports looks at it."""
    context = span.context
    assert context is not None
    flags = TraceFlags(context.trace_flags | TraceFlags.SAMPLED)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(context.trace_id, context.span_id, context.is_remote, flags, context.trace_state),
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
