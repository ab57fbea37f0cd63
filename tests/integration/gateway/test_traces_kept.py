"""Traces outside the ratio: those of requests that failed or missed a promise are kept, here and wherever they were."""

import asyncio
import socket
import time
from typing import Any

import httpx
import msgspec
import pytest

from distserve.bus import subjects
from distserve.errors import DistServeError, InvalidRequest, Overloaded
from distserve.messages import TracesKept, encode
from distserve.telemetry import begin, finish, is_undecided, receive, tracing
from distserve.worker.traces import following_kept_traces
from tests.integration.gateway.real_cluster import serving_http
from tests.integration.gateway.traced import CHAT, SPAN_ID, TEXT, TRACE_ID, Traced, post, traced
from tests.unit.gateway.scripted import says
from tests.waiting import until


def num_held() -> int:
    assert tracing._held is not None
    return tracing._held.num_held


async def test_only_one_that_failed_is_kept(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT), ratio=0.0) as found:
        p0 = found.cluster.workers["p0"]
        for _ in range(3):
            assert (await post(found, "/v1/chat/completions", CHAT)).status_code == 200
        p0.refusal = DistServeError("the worker has a fault")
        assert (await post(found, "/v1/chat/completions", CHAT)).status_code == 500
        p0.refusal = InvalidRequest("the request is at fault", param="prompt")
        assert (await post(found, "/v1/chat/completions", CHAT)).status_code == 400
        p0.refusal = None
        assert (await post(found, "/v1/chat/completions", CHAT | {"temperature": 9})).status_code == 400
        root = await found.root()
        assert root.names() == ("chat tiny", ["admission", "send prefill"])
        assert (root.span.failed, root.span.attributes["error.type"]) == (True, "internal_error")
        assert root.one("send prefill").span.failed
        await until(lambda: bool(found.kept), what="everybody told")
        assert {trace_id.hex() for trace_id in found.kept} == {root.span.trace_id}
        await until(lambda: num_held() == 0, what="what is of no interest forgotten")
    assert {span.trace_id for span in found.receiver.spans()} == {root.span.trace_id}


async def test_a_stream_that_breaks_off_is_kept(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT), ratio=0.0) as found:
        found.cluster.workers["d0"].gate_at = 3
        running = asyncio.create_task(post(found, "/v1/chat/completions", CHAT | {"stream": True}))
        await until(lambda: len(found.cluster.workers["d0"].submitted) == 1)
        await found.cluster.workers["d0"].die()
        assert (await running).status_code == 200
        root = await found.root()
        assert root.span.attributes["distserve.outcome"] == "worker_lost"
        assert root.span.attributes["gen_ai.usage.output_tokens"] == 3


@pytest.mark.parametrize("body", [{}, {"stream": True}])
async def test_a_late_first_token_is_kept_as_soon_as_it_comes_and_to_the_end(
    nats_url: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with traced(nats_url, says(TEXT), ratio=0.0) as found:
        p0, d0 = found.cluster.workers["p0"], found.cluster.workers["d0"]
        p0.gate_at, d0.gate_at = 0, 3
        running = asyncio.create_task(post(found, "/v1/chat/completions", CHAT | {"ttft_slo_ms": 250} | body))
        await until(lambda: len(p0.submitted) == 1)
        await asyncio.sleep(0.3)  # the promise
        p0.gate.set()
        await until(lambda: bool(found.kept), what="told while the answer goes on")
        assert not running.done()
        await found.wait_for(lambda r: r.named("send prefill"))
        [trace_id] = found.kept
        found.kept.clear()
        held = tracing._held
        assert held is not None
        monkeypatch.setattr(held, "_clock", lambda: time.monotonic() + 1000)  # it is a long answer
        finish(begin("of another request", kind="server"))
        d0.gate.set()
        assert (await running).status_code == 200
        root = await found.root()
        assert root.names() == ("chat tiny", ["admission", "send prefill"])
        said = root.span.attributes
        assert (said["distserve.slo_attained"], said["distserve.outcome"], root.span.failed) == ("no", "ok", False)
        assert said["gen_ai.server.time_to_first_token"] > said["distserve.ttft_slo_s"] == 0.25
        assert trace_id.hex() == root.span.trace_id
        await until(lambda: found.kept == [trace_id], what="told again, for those who have forgotten it")


async def test_a_missed_time_for_each_token_is_kept(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT), ratio=0.0) as found:
        d0 = found.cluster.workers["d0"]
        d0.gate_at = 3
        running = asyncio.create_task(post(found, "/v1/chat/completions", CHAT | {"tpot_slo_ms": 0.01}))
        await until(lambda: len(d0.submitted) == 1)
        d0.gate.set()
        assert (await running).status_code == 200
        root = await found.root()
        assert root.span.attributes["distserve.slo_attained"] == "no"


async def test_a_missed_deadline_is_kept_and_a_kept_promise_is_not(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT), ratio=0.0) as found:
        easy = CHAT | {"ttft_slo_ms": 20_000, "tpot_slo_ms": 20_000, "deadline_ms": 60_000}
        assert (await post(found, "/v1/chat/completions", easy)).status_code == 200
        found.cluster.workers["d0"].gate_at = 3
        response = await post(found, "/v1/chat/completions", CHAT | {"deadline_ms": 300})
        assert response.status_code == 504
        root = await found.root()
        assert (root.span.attributes["distserve.outcome"], root.span.failed) == ("deadline_exceeded", True)


async def test_a_client_that_leaves_is_not_kept(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT), ratio=0.0) as found:
        d0 = found.cluster.workers["d0"]
        d0.gate_at = 3
        leaving = asyncio.create_task(post(found, "/v1/chat/completions", CHAT))
        await until(lambda: len(d0.submitted) == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: len(d0.cancelled) == 1)
        await until(lambda: num_held() == 0)
    assert found.receiver.spans() == []
    assert found.kept == []


async def test_a_caller_that_samples_is_exported_whatever_the_ratio_is(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT), ratio=0.0) as found:
        for flags in ("00", "01"):
            await post(found, "/v1/chat/completions", CHAT, headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-{flags}"})
        await found.root(TRACE_ID)
        assert len(found.receiver.spans()) == 3
        assert [headers["traceparent"][-1] for headers in found.headers] == ["0", "1"]
    assert len(found.receiver.spans()) == 3


async def test_whoever_holds_spans_of_a_kept_trace_exports_them(nats_url: str) -> None:
    """As every worker does: its spans are of a trace that a gateway, or another one, has decided on."""
    async with traced(nats_url, says(TEXT), ratio=0.0) as found:
        await post(found, "/v1/chat/completions", CHAT)
        theirs = begin("process prefill", receive(found.headers[0]), kind="consumer")
        finish(theirs)
        assert is_undecided(theirs)
        bus = found.cluster.gateway_bus
        async with following_kept_traces(bus):
            await bus.publish(subjects.traces(), b"\x01\x03nonsense")
            await bus.publish(subjects.traces(), encode(TracesKept(trace_ids=[b"short", b"0" * 16])))
            trace_id = bytes.fromhex(found.headers[0]["traceparent"].split("-")[1])
            await bus.publish(subjects.traces(), encode(TracesKept(trace_ids=[trace_id])))
            await found.wait_for(lambda r: r.named("process prefill"))
            finish(begin("lease", theirs))  # what comes yet
        await found.wait_for(lambda r: r.named("lease"))


async def test_what_is_held_stays_bounded_while_nobody_decides(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(nats_url, says(TEXT), ratio=0.0) as found:
        held = tracing._held
        assert held is not None
        monkeypatch.setattr(held, "_max_spans", 20)
        monkeypatch.setattr(held, "let_go", lambda trace_id: None)  # as in a worker, which is told of nothing
        for _ in range(20):
            await post(found, "/v1/chat/completions", CHAT)
        assert 10 <= held.num_held <= 20


async def test_refusals_of_all_workers_are_told_in_few_messages(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT), ratio=0.0, submit_timeout_s=0.2) as found:
        found.cluster.workers["p0"].refusal = Overloaded("full", retry_after_s=1.0)
        statuses = await asyncio.gather(*(post(found, "/v1/chat/completions", CHAT) for _ in range(20)))
        assert {response.status_code for response in statuses} == {503}
        await until(lambda: len(found.kept) == 20, what="all told")
        await found.wait_for(lambda r: len(r.named("chat tiny")) == 20)
        assert {bytes.fromhex(root.trace_id) for root in found.receiver.named("chat tiny")} == set(found.kept)


async def test_the_last_ones_are_told_when_the_gateway_ends(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT), ratio=0.0) as found:
        found.cluster.workers["p0"].refusal = DistServeError("a fault")
        await post(found, "/v1/chat/completions", CHAT)
        await found.cluster.gateway.traces.__aexit__(None, None, None)  # sooner than it gathers
        await until(lambda: len(found.kept) == 1, 1.0)


async def test_a_receiver_that_is_down_changes_no_answer(nats_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and no word
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with traced(nats_url, says(TEXT), endpoint=endpoint) as found:
            answers = await asyncio.gather(*(post(found, "/v1/chat/completions", CHAT) for _ in range(50)))
            assert {answer.status_code for answer in answers} == {200}
            assert await answers_on_nats(found) == 1


async def answers_on_nats(found: Traced) -> int:
    body = msgspec.json.encode({"prompt": "a", "stream": False})
    return len([m async for m in found.cluster.gateway_bus.stream(subjects.requests("tiny"), body, timeout_s=5)])


async def test_off_nothing_is_sent_along(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT)) as (cluster, url):
        found = Traced(cluster, url, receiver=None)  # type: ignore[arg-type]
        async with await cluster.gateway_bus.subscribe(subjects.worker("prefill", "p0"), found.asked, inline=True):
            async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
                assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
        assert found.headers == []
