"""Logs, and what tracing needs: the exporter's set-up, and a trace's context in and out of bus headers.

No service opens a span yet, so nothing is exported. Without an endpoint no SDK is loaded.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from distserve.errors import ConfigError

_propagator = TraceContextTextMapPropagator()
_QUIET = ("httpx", "httpcore", "urllib3", "filelock", "asyncio", "nats", "transformers")


def setup_logging(service: str, *, level: str = "info", fmt: str = "text") -> None:
    """Send the process's log to stderr, one record a line.

    service: the process's name, e.g. `prefill-1f3a`. level: debug, info, warning, error. fmt: text or json.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(service) if fmt == "json" else _Text(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:  # their news are ours to tell, unless they are bad
        logging.getLogger(name).setLevel(logging.WARNING)


class _Text(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {service} %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("WARNING", "WARN   ", 1)


class _JsonLines(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self.service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"], line["span_id"] = f"{span.trace_id:032x}", f"{span.span_id:016x}"
        return json.dumps(line, ensure_ascii=False, default=str)


def setup_tracing(service: str, endpoint: str) -> Callable[[], None]:
    """Have spans exported in batches to an OTLP/HTTP endpoint, e.g. http://localhost:4318, once somebody opens any.
    Returns what flushes and ends it.

    With an empty endpoint nothing is set up. Raises ConfigError if the `otel` extra isn't installed.
    """
    if not endpoint:
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as e:
        raise ConfigError(
            f"telemetry.otlp_endpoint is {endpoint!r}, but traces need the extra: pip install 'distserve[otel]' ({e})",
            key="telemetry.otlp_endpoint",
            value=endpoint,
            expected="empty, or the extra `otel` installed",
        ) from e
    provider = TracerProvider(resource=Resource.create({"service.name": "distserve", "service.instance.id": service}))
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=5)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def tracer(name: str) -> trace.Tracer:
    """A room's tracer, e.g. `tracer("distserve.bus")`, for spans of requests and hand-overs, never of tokens.

    No service calls it yet.
    """
    return trace.get_tracer(name)


def inject(headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """`headers` and, within a span, its traceparent, for a bus request."""
    carried = dict(headers or {})
    _propagator.inject(carried)
    return carried


def extract(headers: Mapping[str, str]) -> Context:
    """The context that a message's headers carry: `tracer.start_as_current_span(..., context=extract(headers))`.
    No service calls it yet.

    Header names are matched without case; a missing or malformed traceparent gives an empty context.
    """
    return _propagator.extract({k.lower(): v for k, v in headers.items()}, context=Context())
