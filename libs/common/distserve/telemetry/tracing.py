"""One trace for a request through all services: https://www.w3.org/TR/trace-context/ between them, OTLP out of each.

    request = begin("chat smollm2", kind="server")                 # the gateway's
    await bus.request(subject, data, headers=headers_of(request))  # its traceparent rides on requests, never on tokens
    stay = begin("process prefill", receive(delivery.headers), kind="consumer")  # the worker's, in the same trace
    stage("queue", stay, queued_at, started_at, {...})             # what is over already, told at its end
    finish(stay)

Every time is time.monotonic() seconds of this process. Without an endpoint no SDK is loaded, every span is NO_SPAN and
each call returns at once: call sites need no `if`. Attributes that cost something to gather are gathered only where
`span.is_recording()`.

A trace outside the ratio is recorded too, and its spans are held until it is known what became of the request
(held.py): keep() has them exported after all, let_go() forgets them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from distserve.errors import ConfigError, DistServeError

if TYPE_CHECKING:
    from distserve.telemetry.held import HeldSpans

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]

NO_SPAN: Span = INVALID_SPAN
TRACE_ID_BYTES = 16

_KINDS = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}
_NOTHING = Context()
_propagator = TraceContextTextMapPropagator()
_tracer: trace.Tracer | None = None  # None: traces are off
_held: "HeldSpans | None" = None  # None: what is not in the ratio is not recorded
_wall_minus_monotonic_ns = 0

MOST_OFF_NS = 5_000_000  # of the wall clock, before it is believed that somebody has set it
_AT_ONCE_NS = 500_000  # between a look at one clock and at the other
_TOO_MANY_REQUESTS = 429  # the one below 500 that is no client's fault: there is no room, or a promise can't be kept


def setup_tracing(
    service: str,
    endpoint: str,
    *,
    role: str = "",
    ratio: float = 1.0,
    keep_failures: bool = True,
    hold_s: float = 60.0,
) -> Callable[[], None]:
    """Have spans exported in batches to an OTLP/HTTP endpoint, e.g. http://localhost:4318. Returns what flushes, for
    at most exporting.END_S, and ends it.

    service: this process's id, e.g. `prefill-1f3a`; role: prefill, which makes the service's name `distserve-prefill`.
    ratio, keep_failures, hold_s: which traces are exported, see TelemetryConfig.

    With an empty endpoint nothing is set up. Raises ConfigError if the `otel` extra isn't installed.
    """
    global _tracer, _held, _wall_minus_monotonic_ns
    if not endpoint:
        return lambda: None
    try:
        from distserve.telemetry.exporting import Exporting
    except ImportError as e:
        raise ConfigError(
            f"telemetry.otlp_endpoint is {endpoint!r}, but traces need the extra: pip install 'distserve[otel]' ({e})",
            key="telemetry.otlp_endpoint",
            value=endpoint,
            expected="empty, or the extra `otel` installed",
        ) from e
    exporting = Exporting(service, endpoint, role=role, ratio=ratio, hold_s=hold_s if keep_failures else None)
    _wall_minus_monotonic_ns = time.time_ns() - time.monotonic_ns()
    _tracer, _held = exporting.tracer, exporting.held

    def end() -> None:
        global _tracer, _held
        _tracer = _held = None
        exporting.end()

    return end


def is_tracing() -> bool:
    return _tracer is not None


def _look_at_the_wall_clock() -> None:
    """It may have been set since. A thread that was held up between the two clocks would believe so too."""
    global _wall_minus_monotonic_ns
    before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    offset_ns = wall_ns - before_ns
    if after_ns - before_ns < _AT_ONCE_NS and abs(offset_ns - _wall_minus_monotonic_ns) > MOST_OFF_NS:
        _wall_minus_monotonic_ns = offset_ns


def _ns(monotonic_s: float | None) -> int:
    """Of the wall clock; None: now."""
    now_ns = time.monotonic_ns() if monotonic_s is None else int(monotonic_s * 1e9)
    return now_ns + _wall_minus_monotonic_ns


def begin(
    name: str,
    parent: Span | None = None,
    *,
    kind: Kind = "internal",
    at: float | None = None,
    attributes: Attributes | None = None,
    links: Sequence[Span] = (),
) -> Span:
    """A span that finish() ends. `parent`: None begins a trace; one that is not traced (NO_SPAN) begins nothing.
    `links`: spans that it follows from without being part of them: the attempt that it repeats."""
    if _tracer is None or (parent is not None and not parent.get_span_context().is_valid):
        return NO_SPAN
    if parent is None or parent.get_span_context().is_remote:
        _look_at_the_wall_clock()
    context = _NOTHING if parent is None else trace.set_span_in_context(parent, _NOTHING)
    linked = [Link(span.get_span_context()) for span in links if span.get_span_context().is_valid]
    return _tracer.start_span(name, context, kind=_KINDS[kind], attributes=attributes, links=linked, start_time=_ns(at))


def finish(
    span: Span, *, at: float | None = None, attributes: Attributes | None = None, error: BaseException | None = None
) -> None:
    """End it, once. `error` makes it a failed one: `error.type` is a DistServeError's code, else the class's name.
    Its message is left out where the client is at fault: it may repeat what that wrote."""
    if not span.is_recording():
        return
    if attributes:
        span.set_attributes(attributes)
    if error is not None:
        span.set_attribute("error.type", error.code if isinstance(error, DistServeError) else type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, None if _is_clients(error) else str(error)))
    span.end(_ns(at))


def _is_clients(error: BaseException) -> bool:
    return isinstance(error, DistServeError) and error.http_status < 500 and error.http_status != _TOO_MANY_REQUESTS


def stage(
    name: str,
    parent: Span,
    since: float,
    until: float | None = None,
    attributes: Attributes | None = None,
    *,
    kind: Kind = "internal",
    error: BaseException | None = None,
) -> None:
    """A part of `parent` that is over: from `since` to `until` (None: now)."""
    if _tracer is not None and parent.get_span_context().is_valid:
        finish(begin(name, parent, kind=kind, at=since), at=until, attributes=attributes, error=error)


def headers_of(span: Span) -> dict[str, str] | None:
    """What carries it on a bus request: its traceparent. None if it is not traced."""
    if _tracer is None or not span.get_span_context().is_valid:
        return None
    carried: dict[str, str] = {}
    _propagator.inject(carried, trace.set_span_in_context(span, _NOTHING))
    return carried


def receive(headers: Mapping[str, str]) -> Span:
    """The span that a message's or an HTTP request's headers name, for begin()'s `parent`; NO_SPAN if they name none,
    or one that is malformed. Names are matched without case."""
    if _tracer is None or not headers:
        return NO_SPAN
    context = _propagator.extract({name.lower(): value for name, value in headers.items()}, context=_NOTHING)
    return trace.get_current_span(context)


def current() -> Span:
    """The span that `entered` around this code, or NO_SPAN: for what has no other way to hear of it."""
    return trace.get_current_span() if _tracer is not None else NO_SPAN


@contextmanager
def entered(span: Span) -> Iterator[Span]:
    """`span` is the current one inside, for logs and for current(). Does not end it."""
    if _tracer is None:
        yield span
        return
    with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
        yield span


# ---------------------------------------------------------------- traces outside the ratio


def holds_spans() -> bool:
    """Whether spans outside the ratio are held, so that somebody should say which traces are kept."""
    return _held is not None


def is_undecided(span: Span) -> bool:
    """Its trace is outside the ratio: it is exported only if keep() is called for it."""
    context = span.get_span_context()
    return _held is not None and context.is_valid and not context.trace_flags.sampled


def trace_id_of(span: Span) -> bytes:
    """16 bytes, as TracesKept has them."""
    return span.get_span_context().trace_id.to_bytes(TRACE_ID_BYTES, "big")


def keep(trace_ids: Iterable[bytes]) -> None:
    """Export what is held of these traces, and what comes yet. Others, and those of another length, have no effect."""
    if _held is not None:
        _held.keep(int.from_bytes(trace_id, "big") for trace_id in trace_ids if len(trace_id) == TRACE_ID_BYTES)


def let_go(span: Span) -> None:
    """Nothing of its trace is kept here, unless keep() was called or another span of it is still open."""
    if _held is not None:
        _held.let_go(span.get_span_context().trace_id)
