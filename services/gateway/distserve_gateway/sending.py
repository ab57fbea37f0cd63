"""A submission's attempts in its request's trace."""

from collections.abc import Iterator
from contextlib import contextmanager

from distserve.errors import DistServeError
from distserve.telemetry import Span, begin, finish
from distserve_gateway.live import LiveSequence
from distserve_gateway.request_trace import end_span
from distserve_gateway.route import Route


@contextmanager
def sending(sequence: LiveSequence, route: Route, role: str, subject: str) -> Iterator[Span]:
    """Around one attempt, from its sending to the reply: gives the span to send along. The next attempt is linked to
    it."""
    if not sequence.trace.is_recording():
        yield sequence.trace
        return
    before = sequence.last_send
    span = sequence.last_send = begin(
        f"send {role}",
        sequence.trace,
        kind="client",
        links=[] if before is None else [before],
        attributes={
            "messaging.system": "nats",
            "messaging.operation.type": "send",
            "messaging.destination.name": subject,
            "distserve.request_id": sequence.request_id,
            "distserve.output": sequence.index,
            "distserve.attempt": sequence.attempt,
            "distserve.route.kind": route.kind,
            "distserve.route.reason": route.reason,
            "distserve.route.prefill_worker": route.prefill_worker or "",
            "distserve.route.decode_worker": route.decode_worker,
            "distserve.route.num_uncached_tokens": route.num_uncached,
        },
    )
    try:
        yield span
    except DistServeError as e:
        end_span(span, e)
        raise
    finally:
        finish(span)
