"""Logs for people and machines; traces that cross processes and reach a real receiver."""

import json
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry import trace

from distserve.telemetry import extract, inject, setup_tracing, tracer

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03"


def run(code: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_text_lines() -> None:
    err = run("""
        import logging
        from distserve.telemetry import setup_logging
        setup_logging("prefill-1", level="warning")
        logging.getLogger("distserve.kv").warning("low on %s", "blocks")
        logging.getLogger("distserve.kv").info("not shown")
    """).stderr.splitlines()
    assert len(err) == 1
    assert err[0].endswith("WARN    prefill-1 distserve.kv: low on blocks")


def test_json_lines_hold_exceptions_and_the_trace() -> None:
    err = run(f"""
        import logging
        from distserve.telemetry import setup_logging, extract, tracer
        setup_logging("d", fmt="json")
        try:
            1 / 0
        except ZeroDivisionError:
            with tracer("t").start_as_current_span("s", context=extract({{"traceparent": "{TRACEPARENT}"}})):
                logging.getLogger("x").exception("bröken")
    """).stderr
    line = json.loads(err)
    assert {k: line[k] for k in ("level", "service", "logger", "message")} == {
        "level": "error",
        "service": "d",
        "logger": "x",
        "message": "bröken",
    }
    assert "ZeroDivisionError" in line["exception"]
    assert line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"


def test_a_callers_trace_passes_through_without_an_sdk() -> None:
    """From one service's headers to the next one's, unsampled work or not."""
    with tracer("t").start_as_current_span("s", context=extract({"Traceparent": TRACEPARENT, "other": "1"})):
        headers = inject({"keep": "me"})
    assert headers["keep"] == "me"
    assert headers["traceparent"].split("-")[1] == TRACEPARENT.split("-")[1]


@pytest.mark.parametrize("bad", ["", "nonsense", "00-0-0-0", TRACEPARENT + "\r\nx: y"])
def test_a_malformed_trace_is_ignored(bad: str) -> None:
    assert not trace.get_current_span(extract({"traceparent": bad})).get_span_context().is_valid


def test_nothing_is_injected_without_a_span() -> None:
    assert inject({"a": "b"}) == {"a": "b"}
    assert inject() == {}


def test_without_an_endpoint_no_sdk_is_loaded() -> None:
    run("""
        import sys
        from distserve.telemetry import setup_tracing
        setup_tracing("gateway-1", "")()
        assert not [m for m in sys.modules if m.startswith(("opentelemetry.sdk", "google"))]
    """)


def test_spans_reach_an_otlp_receiver_with_the_callers_trace() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[tuple[str, bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            run(f"""
                from distserve.telemetry import setup_tracing, tracer, extract
                end = setup_tracing("prefill-1", "http://127.0.0.1:{server.server_port}/")
                parent = extract({{"traceparent": "{TRACEPARENT}"}})
                tracer("distserve.bus").start_span("send x", context=parent).end()
                end()
            """)
        finally:
            server.shutdown()
            thread.join(10)
    ((path, body),) = received
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("distserve", "prefill-1")
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("send x", TRACEPARENT.split("-")[1])
    assert span.parent_span_id.hex() == TRACEPARENT.split("-")[2]


def test_setting_up_nothing_returns_something_to_call() -> None:
    setup_tracing("x", "")()
