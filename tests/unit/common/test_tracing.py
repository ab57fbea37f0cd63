"""Spans as services make them: across headers, to a real receiver; and nothing at all where traces are off."""

import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from distserve import __version__
from distserve.errors import (
    BusTimeout,
    Cancelled,
    ConfigError,
    DistServeError,
    InvalidRequest,
    Overloaded,
    SloUnattainable,
)
from distserve.telemetry import (
    NO_SPAN,
    Span,
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
    tracing,
)
from tests.otlp import Received, Receiver

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-03"


@contextmanager
def traces(receiver: Receiver, **options: Any) -> Iterator[None]:
    """Everything is exported when it is left."""
    end = setup_tracing("prefill-1", receiver.url, **options)
    try:
        yield
    finally:
        end()


def by_name(receiver: Receiver) -> dict[str, Received]:
    return {span.name: span for span in receiver.spans()}


def test_a_trace_goes_from_headers_through_a_service_to_headers() -> None:
    with Receiver() as receiver, traces(receiver, role="prefill"):
        stay = begin("process prefill", receive({"Traceparent": TRACEPARENT, "other": "1"}), kind="consumer")
        stage("queue", stay, time.monotonic() - 2, time.monotonic() - 1, {"distserve.batch.tokens": 7})
        sent = headers_of(stay)
        finish(stay, attributes={"distserve.worker": "prefill-1"})
        assert sent is not None
        _, trace_id, span_id, flags = sent["traceparent"].split("-")
    found = by_name(receiver)
    process, queue = found["process prefill"], found["queue"]
    assert (process.trace_id, process.parent_id, process.kind) == (TRACE_ID, SPAN_ID, "consumer")
    assert (trace_id, span_id, int(flags, 16) & 1) == (TRACE_ID, process.span_id, 1)
    assert (queue.trace_id, queue.parent_id, queue.attributes) == (
        TRACE_ID,
        process.span_id,
        {"distserve.batch.tokens": 7},
    )
    assert queue.end - queue.start == pytest.approx(1, abs=1e-3)
    assert queue.start == pytest.approx(time.time() - 2, abs=30)
    assert process.attributes == {"distserve.worker": "prefill-1"}


def test_the_resource_says_which_service_it_is() -> None:
    with Receiver() as receiver, traces(receiver, role="prefill"):
        finish(begin("s"))
    [span] = receiver.spans()
    own = {"service.name": "distserve-prefill", "service.instance.id": "prefill-1", "service.version": __version__}
    assert span.resource.items() >= (own | {"host.name": socket.gethostname()}).items()
    assert span.service == "prefill"


def test_a_failed_span_names_its_error_and_a_repeated_one_is_linked_to_it() -> None:
    with Receiver() as receiver, traces(receiver):
        root = begin("root")
        first = begin("send prefill", root, kind="client")
        finish(first, error=BusTimeout("no answer from x within 2 s", subject="x"))
        second = begin("send prefill", root, kind="client", links=[first, NO_SPAN])
        finish(second)
        finish(second, error=ValueError("an ended span takes nothing more"))
        stage("other", root, time.monotonic(), error=ValueError("v"))
        finish(root)
    failed, good = sorted(receiver.named("send prefill"), key=lambda span: not span.failed)
    assert (failed.failed, failed.message) == (True, "no answer from x within 2 s")
    assert failed.attributes == {"error.type": "bus_timeout"}
    assert (good.failed, good.links) == (False, [failed.span_id])
    assert by_name(receiver)["other"].attributes == {"error.type": "ValueError"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidRequest("stop is 'a secret'", param="stop", value="a secret"), ""),
        (Cancelled("'a secret' is wanted no more"), ""),
        (SloUnattainable("the first token would come after 3 s"), "the first token would come after 3 s"),
        (Overloaded("the queue is full"), "the queue is full"),
    ],
)
def test_what_a_client_got_wrong_is_named_without_words(error: DistServeError, message: str) -> None:
    with Receiver() as receiver, traces(receiver):
        finish(begin("process prefill"), error=error)
    [span] = receiver.spans()
    assert (span.failed, span.message, span.attributes) == (True, message, {"error.type": error.code})


@pytest.mark.parametrize(("step_s", "seen_s"), [(3600.0, 3600.0), (-3600.0, -3600.0), (0.002, 0.0)])
def test_a_wall_clock_that_is_set_is_seen_when_something_new_begins(
    monkeypatch: pytest.MonkeyPatch, step_s: float, seen_s: float
) -> None:
    offset_ns = [0]
    clocks = SimpleNamespace(time_ns=lambda: time.time_ns() + offset_ns[0], monotonic_ns=time.monotonic_ns)
    with Receiver() as receiver, traces(receiver):
        first = begin("first")
        before = tracing._wall_minus_monotonic_ns
        monkeypatch.setattr(tracing, "time", clocks)
        offset_ns[0] = int(step_s * 1e9)
        finish(begin("part", first))
        assert tracing._wall_minus_monotonic_ns == before, "its trace goes on as it began"
        stay = begin("stay", receive({"traceparent": TRACEPARENT}), kind="consumer")
        finish(stay)
        finish(begin("second"))
        offset_ns[0] = 0
    found = by_name(receiver)
    assert found["part"].start == pytest.approx(time.time(), abs=60)
    for name in ("stay", "second"):
        assert found[name].start == pytest.approx(time.time() + seen_s, abs=60)
    assert (tracing._wall_minus_monotonic_ns == before) is (seen_s == 0)


def test_a_thread_that_was_held_up_between_the_clocks_believes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as receiver, traces(receiver):
        before = tracing._wall_minus_monotonic_ns
        ticks = iter(range(0, 10**12, 20_000_000))  # 20 ms from one look to the next
        start_ns = time.monotonic_ns()
        clocks = SimpleNamespace(time_ns=time.time_ns, monotonic_ns=lambda: start_ns + next(ticks))
        monkeypatch.setattr(tracing, "time", clocks)
        start_ns -= 10**9  # as if the wall clock were a second ahead
        begin("one").end()
        assert tracing._wall_minus_monotonic_ns == before


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "nonsense",
        "00-0-0-0",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        TRACEPARENT + "\r\nx: y",
    ],
)
def test_a_malformed_traceparent_is_ignored(bad: str) -> None:
    with Receiver() as receiver, traces(receiver):
        assert not receive({"traceparent": bad}).get_span_context().is_valid
        assert receive({}) is NO_SPAN


def test_the_entered_span_is_the_current_one_inside_alone() -> None:
    with Receiver() as receiver, traces(receiver):
        outer, inner = begin("outer"), begin("inner")

        def fail() -> None:
            with entered(inner):
                assert current() is inner
                raise RuntimeError("an error that passes is not the span's")

        with entered(outer):
            with pytest.raises(RuntimeError):
                fail()
            assert current() is outer
        assert not current().is_recording()
        for span in (outer, inner):
            assert span.is_recording()
            finish(span)
    assert not any(span.failed for span in receiver.spans())


def test_off_each_call_returns_at_once() -> None:
    assert not is_tracing()
    assert not holds_spans()
    span = begin("x", kind="server", links=[NO_SPAN], attributes={"a": 1})
    assert span is NO_SPAN
    assert receive({"traceparent": TRACEPARENT}) is NO_SPAN
    assert current() is NO_SPAN
    assert headers_of(span) is None
    assert not is_undecided(span)
    stage("x", span, 0.0)
    finish(span, error=ValueError())
    keep([bytes(16)])
    let_go(span)
    with entered(span) as same:
        assert same is span


def test_without_an_endpoint_no_sdk_is_loaded() -> None:
    code = """
        import sys
        from distserve.telemetry import begin, setup_tracing
        setup_tracing("gateway-1", "")()
        begin("x")
        assert not [m for m in sys.modules if m.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "google"))]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=True)


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.delitem(sys.modules, "distserve.telemetry.exporting", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'distserve\[otel\]'"):
        setup_tracing("x", "http://127.0.0.1:9")
    assert not is_tracing()


# ------------------------------------------------------------ outside the ratio


def outside_the_ratio(name: str) -> Span:
    root = begin(name, kind="server")
    stage("admission", root, time.monotonic())
    finish(root)
    assert is_undecided(root)
    return root


def test_a_kept_trace_is_exported_whole_and_others_are_not() -> None:
    with Receiver() as receiver:
        with traces(receiver, ratio=0.0):
            kept, dropped, unsaid = map(outside_the_ratio, ("kept", "dropped", "unsaid"))
            keep([trace_id_of(kept), b"too short", bytes(16)])
            let_go(dropped)
            keep([trace_id_of(dropped)])  # too late
            stage("later", kept, time.monotonic())
        assert sorted(span.name for span in receiver.spans()) == ["admission", "kept", "later"]
        assert {span.trace_id for span in receiver.spans()} == {trace_id_of(kept).hex()}
        assert receiver.tree(trace_id_of(kept).hex()).names() == ("kept", ["admission", "later"])
        assert unsaid is not None


def test_where_failures_are_not_kept_nothing_outside_the_ratio_is_recorded() -> None:
    with Receiver() as receiver:
        with traces(receiver, ratio=0.0, keep_failures=False):
            root = begin("root", kind="server")
            assert not root.is_recording()
            assert not holds_spans()
            sent = headers_of(root)
            assert sent is not None
            assert int(sent["traceparent"].rsplit("-", 1)[1], 16) & 1 == 0
            keep([trace_id_of(root)])
            finish(root)
        assert receiver.spans() == []


def test_what_follows_a_kept_trace_is_sampled_from_the_start() -> None:
    with Receiver() as receiver, traces(receiver, ratio=0.0):
        root = begin("root", kind="server")
        keep([trace_id_of(root)])
        child = begin("child", root)
        sent = headers_of(child)
        assert sent is not None
        assert int(sent["traceparent"].rsplit("-", 1)[1], 16) & 1 == 1
        finish(child)
        finish(root)
