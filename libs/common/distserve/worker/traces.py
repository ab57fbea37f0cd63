"""A service's part in traces: set up around its life, and told by gateways which of them are kept after all."""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from distserve.bus import subjects
from distserve.bus.base import Bus, Delivery
from distserve.config import TelemetryConfig
from distserve.errors import DistServeError
from distserve.messages import Role, TracesKept, decode_as
from distserve.telemetry import holds_spans, keep, setup_tracing

log = logging.getLogger(__name__)


@contextmanager
def traced(role: Role, service_id: str, config: TelemetryConfig) -> Iterator[None]:
    """Spans that begin inside are exported as `config` says; the last ones are sent at its end. Raises ConfigError."""
    end = setup_tracing(
        service_id,
        config.otlp_endpoint,
        role=role,
        ratio=config.trace_ratio,
        keep_failures=config.trace_failures,
        hold_s=config.trace_hold_s,
    )
    try:
        yield
    finally:
        end()


@asynccontextmanager
async def following_kept_traces(bus: Bus) -> AsyncIterator[None]:
    """Inside, what gateways say is heeded. Where no spans are held it is not listened to."""
    if not holds_spans():
        yield
        return
    async with await bus.subscribe(subjects.traces(), _on_kept, inline=True):
        yield


async def _on_kept(delivery: Delivery) -> None:
    try:
        keep(decode_as(TracesKept, delivery.data).trace_ids)
    except DistServeError as e:
        log.warning("a message on %s says nothing: %s", delivery.subject, e)
