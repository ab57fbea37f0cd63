"""Submissions: how long one waits for a worker, and what becomes of it where the worker is silent or refuses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.config import load_config
from distserve.errors import DistServeError, Overloaded
from distserve.messages import SubmitReply, SubmitRequest, WorkerInfo, decode
from distserve_gateway.main import options_of
from tests.unit.gateway.scripted import LAYOUT, MODEL, Cluster, memory_cluster, says, serving
from tests.unit.gateway.streamed import BODY, TEXT, SilentWorker, ask, text_of
from tests.waiting import until


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with serving(says(TEXT), silence_s=0.1) as cluster:
        yield cluster


async def test_a_worker_that_does_not_answer_is_waited_for_as_long_as_configured() -> None:
    attempts: list[int] = []

    async def silent(delivery: Delivery) -> bytes:
        message = decode(delivery.data)
        if not isinstance(message, SubmitRequest):
            return b""
        attempts.append(message.key.attempt)
        await asyncio.Event().wait()
        return b""

    cluster = memory_cluster()
    try:
        await cluster.add("decode", "d0", says("x"))
        bus = await cluster._stack.enter_async_context(await cluster._connect("p0"))
        await cluster._stack.enter_async_context(await bus.serve(subjects.worker("prefill", "p0"), silent))
        await bus.registry().put(WorkerInfo(worker_id="p0", role="prefill", model=MODEL, status="ok", layout=LAYOUT))
        await cluster.start_gateway(submit_timeout_s=60.0, ttl_s=60.0, reply_timeout_s=0.05)
        await cluster.see("p0", "d0")
        async with cluster.client() as client:
            task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
            # At the default's pace the fifth attempt would start after eight seconds.
            await until(lambda: len(attempts) >= 5, 5, "five attempts")
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    finally:
        await cluster.close()
    assert attempts[:5] == [0, 1, 2, 3, 4]


def test_the_configuration_says_how_long(tmp_path: Path) -> None:
    config = load_config(overrides={"bus.request_timeout_s": 0.7, "model.max_model_len": 64})
    assert options_of(config, tmp_path).reply_timeout_s == 0.7


async def test_a_worker_that_does_not_answer_a_submission_is_passed_over_and_told_to_forget_it() -> None:
    cluster = memory_cluster()
    try:
        await cluster.add("decode", "d0", says(TEXT))
        silent = SilentWorker(accepts=False)
        bus = await cluster._stack.enter_async_context(await cluster._connect("p0"))
        await cluster._stack.enter_async_context(await bus.serve(subjects.worker("prefill", "p0"), silent))
        await bus.registry().put(WorkerInfo(worker_id="p0", role="prefill", model=MODEL, status="ok", layout=LAYOUT))
        await cluster.start_gateway(submit_timeout_s=4.0, ttl_s=60.0)
        await cluster.see("p0", "d0")
        task = asyncio.create_task(ask(cluster))
        await until(lambda: bool(silent.submitted))
        spare = await cluster.add("prefill", "p1", says(TEXT))
        await cluster.see("p1")
        assert text_of(await task) == TEXT
        [request] = spare.submitted
        assert request.key.attempt == 1
        await until(lambda: bool(silent.cancelled), what="p0 told to forget it")
        assert silent.cancelled[0].attempt == 0
    finally:
        await cluster.close()


@pytest.mark.parametrize(("drains", "status", "code"), [(False, 504, "deadline_exceeded"), (True, 503, "draining")])
async def test_what_ends_a_sequence_during_its_submission_is_told_as_it_is(
    drains: bool, status: int, code: str
) -> None:
    cluster = memory_cluster()
    try:
        await cluster.add("decode", "d0", says(TEXT))
        silent = SilentWorker(accepts=False)
        bus = await cluster._stack.enter_async_context(await cluster._connect("p0"))
        await cluster._stack.enter_async_context(await bus.serve(subjects.worker("prefill", "p0"), silent))
        await bus.registry().put(WorkerInfo(worker_id="p0", role="prefill", model=MODEL, status="ok", layout=LAYOUT))
        timeout_s = 60.0 if drains else 0.3
        await cluster.start_gateway(submit_timeout_s=2.0, reply_timeout_s=0.5, request_timeout_s=timeout_s, ttl_s=60.0)
        await cluster.see("p0", "d0")
        async with cluster.client() as client:
            task = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await until(lambda: bool(silent.submitted))
            if drains:
                assert await cluster.gateway.drain(0.0) is False
            response = await task
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    finally:
        await cluster.close()


async def test_an_answer_that_is_complete_before_its_submission_is_acknowledged_is_no_error(cluster: Cluster) -> None:
    worker = cluster.workers["p0"]
    submit = worker.submit

    def accepts_and_dies(request: SubmitRequest) -> SubmitReply:
        submit(request)
        raise Overloaded("the reply is lost, the work is done")

    ended = asyncio.Event()
    streams = cluster.gateway.streams
    request = cluster.gateway_bus.request

    async def late(subject: str, data: bytes, **options: Any) -> bytes:
        answer = await request(subject, data, **options)
        if subject == subjects.worker("prefill", "p0") and isinstance(decode(data), SubmitRequest):
            await until(lambda: len(streams) == 0, what="the end")
            ended.set()
        return answer

    worker.submit = accepts_and_dies  # type: ignore[method-assign]
    cluster.gateway_bus.request = late
    assert text_of(await ask(cluster)) == TEXT
    assert ended.is_set()


async def test_an_error_at_submission_leaves_nothing_live(cluster: Cluster) -> None:
    cluster.workers["p0"].refusal = DistServeError("out of luck")
    async with cluster.client() as client:
        response = await client.post("/v1/completions", json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "out of luck"
    assert len(cluster.gateway.streams) == 0
    assert cluster.gateway.workers.in_flight == {}
