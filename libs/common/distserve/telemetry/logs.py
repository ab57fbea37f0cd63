"""The process's log: lines for people or for machines."""

import json
import logging
import sys
import time
from typing import Any

from opentelemetry import trace

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
