"""Logs for people and machines, with the trace that a line belongs to."""

import json
import subprocess
import sys
import textwrap

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
        from distserve.telemetry import begin, entered, receive, setup_logging, setup_tracing
        setup_logging("d", fmt="json")
        end = setup_tracing("d", "http://127.0.0.1:9", ratio=0, keep_failures=False)
        span = begin("s", receive({{"traceparent": "{TRACEPARENT}"}}))
        try:
            1 / 0
        except ZeroDivisionError:
            with entered(span):
                logging.getLogger("x").exception("bröken")
        logging.getLogger("x").error("outside")
        import os; os._exit(0)
    """).stderr
    inside, outside = map(json.loads, err.splitlines())
    assert {k: inside[k] for k in ("level", "service", "logger", "message")} == {
        "level": "error",
        "service": "d",
        "logger": "x",
        "message": "bröken",
    }
    assert "ZeroDivisionError" in inside["exception"]
    assert inside["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert inside["span_id"] not in ("", "b7ad6b7169203331")
    assert "trace_id" not in outside


def test_lines_name_no_trace_where_traces_are_off() -> None:
    err = run("""
        import logging
        from distserve.telemetry import begin, entered, setup_logging
        setup_logging("d", fmt="json")
        with entered(begin("s")):
            logging.getLogger("x").warning("w")
    """).stderr
    assert "trace_id" not in json.loads(err)
