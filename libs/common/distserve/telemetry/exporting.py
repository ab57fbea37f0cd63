"""Spans on their way out: the SDK's batches and exporter, what is held before them, and quiet about a receiver that is
down. Needs the SDK, which is loaded with this module."""

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from distserve import __version__
from distserve.telemetry.held import HeldSpans
from distserve.telemetry.sampling import RequestSampler

log = logging.getLogger(__name__)

BATCH_S = 1.0  # a span waits so long for others
BATCH_SPANS = 64  # encoding them takes the interpreter for some 4 ms, in which no token leaves; 512 would take 25
MAX_QUEUED = 8192  # spans: what a receiver that is down may cost
ATTEMPT_S = 5.0  # for a batch, with what the exporter tries again
END_S = 2.0  # for the last ones, when the process ends
SAY_AGAIN_S = 60.0  # of what goes wrong with each batch

_NAMED = re.compile(r"(?<=://)[^/]*@")  # a user in a URL: the password is a secret
_SDK_LOGS = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")


class Exporting:
    """A process's tracer, and all behind it. `hold_s`: None if what is not in the ratio isn't recorded. `service`,
    `role`: see setup_tracing."""

    def __init__(self, service: str, endpoint: str, *, role: str, ratio: float, hold_s: float | None) -> None:
        self._shown = _NAMED.sub("", endpoint)
        lost = _Lost(self._shown)
        self._said = _Said(lost)
        for name in _SDK_LOGS:
            logger = logging.getLogger(name)
            for left in [f for f in logger.filters if isinstance(f, _Said)]:  # by one that did not end in time
                logger.removeFilter(left)
            logger.addFilter(self._said)
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=ATTEMPT_S)
        self._exporter = _Reporting(exporter, lost)
        batches = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUED,
            schedule_delay_millis=BATCH_S * 1000,
            max_export_batch_size=BATCH_SPANS,
        )
        self.held = None if hold_s is None else HeldSpans(batches, hold_s)
        sampler = RequestSampler(
            ratio,
            records_all=self.held is not None,
            is_kept=(lambda trace_id: False) if self.held is None else self.held.is_kept,
        )
        self._provider = TracerProvider(sampler, resource_of(service, role), shutdown_on_exit=False)
        self._provider.add_span_processor(batches if self.held is None else self.held)
        self.tracer: trace.Tracer = self._provider.get_tracer("distserve", __version__)

    def end(self) -> None:
        """Send what is there, within END_S; what is left then is lost."""
        # The SDK waits for half a minute, on threads that the process may leave behind.
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(END_S)
        if ending.is_alive():
            log.warning("%s did not take the last traces within %g s", self._shown, END_S)
            self._exporter.shutdown()  # it tries nothing again
            return  # what the SDK still says is not for the log either
        for name in _SDK_LOGS:
            logging.getLogger(name).removeFilter(self._said)


def resource_of(service: str, role: str) -> Resource:
    """Who the spans are from. What OTEL_RESOURCE_ATTRIBUTES says is added."""
    return Resource.create(
        {
            "service.name": f"distserve-{role}" if role else "distserve",
            "service.instance.id": service,
            "service.version": __version__,
            "host.name": socket.gethostname(),
        }
    )


class _Lost:
    """Says what is lost, now and then. Of any thread."""

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason = ""
        self._endpoint = endpoint
        self._clock = clock
        self._num = 0
        self._quiet_until = 0.0

    def lost(self, num: int) -> None:
        self._num += num
        now = self._clock()
        if now < self._quiet_until:
            return
        self._quiet_until = now + SAY_AGAIN_S
        log.warning("%d spans or more are lost: %s does not take them: %s", self._num, self._endpoint, self.reason)
        self._num = 0


class _Said(logging.Filter):
    """Keeps the SDK's words about each batch, and each span too many, from the log."""

    def __init__(self, lost: _Lost) -> None:
        super().__init__()
        self._lost = lost

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self._lost.reason = record.getMessage()
            if self._lost.reason.startswith("Queue full"):
                self._lost.lost(1)
        return False


class _Reporting(SpanExporter):
    def __init__(self, exporter: SpanExporter, lost: _Lost) -> None:
        self._exporter = exporter
        self._lost = lost
        self._is_shut = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lost.lost(len(spans))
        return result

    def shutdown(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
