"""Logs and traces. What a service measures in numbers is in its own `metrics.py`."""

from opentelemetry.trace import Span

from distserve.telemetry.logs import setup_logging
from distserve.telemetry.tracing import (
    NO_SPAN,
    Attributes,
    begin,
    current,
    entered,
    finish,
    headers_of,
    holds_spans,
    is_tracing,
    is_undecided,
    keep,
    let_go,
    receive,
    setup_tracing,
    stage,
    trace_id_of,
)

__all__ = [
    "NO_SPAN",
    "Attributes",
    "Span",
    "begin",
    "current",
    "entered",
    "finish",
    "headers_of",
    "holds_spans",
    "is_tracing",
    "is_undecided",
    "keep",
    "let_go",
    "receive",
    "setup_logging",
    "setup_tracing",
    "stage",
    "trace_id_of",
]
