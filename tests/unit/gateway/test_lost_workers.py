"""Dead, frozen and restarted workers: no stream hangs, and none is given up that could go on."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from distserve.bus import subjects
from distserve.bus.memory import MemoryBus
from distserve.errors import WorkerLost
from distserve.messages import WorkerInfo
from tests.unit.gateway.scripted import LAYOUT, MODEL, TOKENIZER, Cluster, memory_cluster, says, serving
from tests.unit.gateway.streamed import BODY, TEXT, SilentWorker, ask, text_of
from tests.waiting import until


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with serving(says(TEXT), silence_s=0.1) as cluster:
        yield cluster


async def test_a_hand_over_to_another_decode_worker_is_followed(cluster: Cluster) -> None:
    await cluster.add("decode", "d1", says(TEXT))
    cluster.workers["p0"].redirect = "d1"
    assert text_of(await ask(cluster)) == TEXT


async def test_a_decode_worker_killed_in_mid_answer_ends_its_streams_with_an_error_event(cluster: Cluster) -> None:
    cluster.workers["d0"].gate_at = 3
    tasks = [asyncio.create_task(ask(cluster)) for _ in range(5)]
    await until(lambda: [len(s.token_ids) for s in cluster.gateway.streams] == [3] * 5, what="three tokens of each")
    await cluster.workers["d0"].die()
    began = time.monotonic()
    for task in tasks:
        events = await task
        assert events[-1]["error"]["code"] == "worker_lost"
        assert "'d0'" in events[-1]["error"]["message"]
        assert events[-1]["error"]["type"] == "worker_error"
        assert text_of(events[:-1]) == TOKENIZER.decode(cluster_ids(3), skip_special_tokens=True)
    assert time.monotonic() - began < 3.0
    assert len(cluster.gateway.streams) == 0
    assert cluster.gateway.workers.in_flight == {}


def cluster_ids(num: int) -> list[int]:
    return TOKENIZER.encode(TEXT, add_special_tokens=False)[:num]


async def test_new_requests_go_to_the_rest_after_a_worker_is_lost(cluster: Cluster) -> None:
    spare = await cluster.add("decode", "d1", says(TEXT))
    await cluster.see("d1")
    await cluster.workers["d0"].die()
    for _ in range(3):  # until the registry notices, some may still go to the dead one
        events = await ask(cluster)
        assert events[-1] == "[DONE]" or events[-1]["error"]["code"] == "worker_lost"
    await cluster.gateway.watch.wait_for(lambda snapshot: "d0" not in snapshot, 6.0)
    num_before = len(spare.submitted)
    for _ in range(3):
        assert text_of(await ask(cluster)) == TEXT
    assert len(spare.submitted) == num_before + 3


async def test_a_prefill_worker_killed_before_the_first_token_is_a_502_without_stream(cluster: Cluster) -> None:
    cluster.workers["p0"].gate_at = 0

    async def whole() -> Any:
        async with cluster.client() as client:
            return await client.post("/v1/completions", json=BODY | {"stream": False})

    task = asyncio.create_task(whole())
    await until(lambda: len(cluster.workers["p0"].submitted) == 1)
    began = time.monotonic()
    await cluster.workers["p0"].die()
    response = await task
    assert time.monotonic() - began < 3.0
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "worker_lost"
    assert "prefill worker 'p0'" in response.json()["error"]["message"]


async def test_a_prefill_worker_killed_after_the_hand_over_harms_nobody(cluster: Cluster) -> None:
    cluster.workers["d0"].gate_at = 3
    task = asyncio.create_task(ask(cluster))
    await until(lambda: len(cluster.workers["d0"].submitted) == 1)
    await cluster.workers["p0"].die()
    await cluster.gateway.watch.wait_for(lambda snapshot: "p0" not in snapshot, 6.0)
    cluster.workers["d0"].gate.set()
    assert text_of(await task) == TEXT


async def test_a_worker_that_was_restarted_and_knows_nothing_is_lost_for_its_streams(cluster: Cluster) -> None:
    cluster.workers["d0"].gate_at = 3
    task = asyncio.create_task(ask(cluster))
    await until(lambda: len(cluster.workers["d0"].submitted) == 1)
    worker = cluster.workers["d0"]
    worker._stop_all()
    worker.outbox.drop([r.key for r in worker.submitted])
    assert (await task)[-1]["error"]["code"] == "worker_lost"


async def test_an_error_of_the_worker_comes_as_it_is(cluster: Cluster) -> None:
    cluster.workers["d0"].gate_at = 3
    task = asyncio.create_task(ask(cluster))
    worker = cluster.workers["d0"]
    await until(lambda: len(worker.submitted) == 1)
    worker.outbox.finish(worker.submitted[0].key, "error", error=WorkerLost("the pool burnt", worker="d0"))
    await worker.outbox.flush()
    assert (await task)[-1]["error"]["message"] == "the pool burnt"


async def test_a_cut_of_the_gateways_bus_ends_no_stream() -> None:
    cluster = memory_cluster(registry_ttl_s=0.8)
    try:
        await cluster.add("decode", "d0", says(TEXT), gate_at=3)
        await cluster.add("prefill", "p0", says(TEXT))
        await cluster.start_gateway(silence_s=0.1)
        await cluster.see("p0", "d0")
        task = asyncio.create_task(ask(cluster))
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        bus = cluster.gateway_bus
        assert isinstance(bus, MemoryBus)
        bus.hub.cut(bus)
        cluster.workers["d0"].gate.set()  # these tokens are lost
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 1.5)  # longer than silence, strikes and TTL together
        assert not task.done()
        bus.hub.heal(bus)
        assert text_of(await task) == TEXT
    finally:
        await cluster.close()


async def test_a_request_past_its_deadline_ends_with_504() -> None:
    async with serving(says(TEXT), request_timeout_s=0.3) as cluster:
        cluster.workers["d0"].gate_at = 2
        events = await ask(cluster)
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        await until(lambda: bool(cluster.workers["d0"].cancelled), what="decode told")


async def test_a_frozen_worker_ends_its_streams_within_three_seconds() -> None:
    cluster = memory_cluster()
    try:
        silent = SilentWorker(accepts=True)
        bus = await cluster._stack.enter_async_context(await cluster._connect("d0"))
        await cluster._stack.enter_async_context(await bus.serve(subjects.worker("decode", "d0"), silent))
        info = WorkerInfo(worker_id="d0", role="decode", model=MODEL, status="ok", layout=LAYOUT, colocated=True)
        await cluster.start_gateway()
        await bus.registry().put(info)  # the last beat before it froze
        await cluster.see("d0")
        began = time.monotonic()
        events = await ask(cluster)
        assert events[-1]["error"]["code"] == "worker_lost"
        assert time.monotonic() - began < 3.0
        assert silent.questions >= 1
    finally:
        await cluster.close()
