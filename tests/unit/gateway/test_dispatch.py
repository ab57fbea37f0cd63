"""How long a submission waits for one worker."""

import asyncio
import contextlib
from pathlib import Path

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.config import load_config
from distserve.messages import SubmitRequest, WorkerInfo, decode
from distserve_gateway.main import options_of
from tests.unit.gateway.scripted import LAYOUT, MODEL, memory_cluster, says
from tests.waiting import until


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
