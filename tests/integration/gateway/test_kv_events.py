"""What workers hold, as the gateway follows it over a real nats-server, and where that sends requests."""

import asyncio
import os
import random

import httpx

from distserve.bus.embedded import EmbeddedNats
from distserve.bus.nats import NatsBus
from distserve.messages import KVEvents
from tests.integration.gateway.real_cluster import serving_http
from tests.unit.gateway.scripted import Cluster, ScriptedWorker, names, says
from tests.waiting import until

NAMES = [i.to_bytes(8, "little") for i in range(1, 20_000)]
PROMPT = list(range(200, 320))


async def agree(cluster: Cluster, worker: ScriptedWorker) -> None:
    index = cluster.gateway.kv.index

    def agreed() -> bool:
        known = index.holders.get(worker.worker_id, {})
        return index.lacks(worker.worker_id) is None and known == worker.blocks.numbers

    await until(agreed, what=f"the index holds what {worker.worker_id} holds")
    index.check()


async def test_lost_doubled_and_reordered_events_end_in_what_each_worker_holds(nats_url: str) -> None:
    draw = random.Random(11)
    async with serving_http(nats_url, says("x")) as (cluster, _):
        workers = [cluster.workers["p0"], cluster.workers["d0"], await cluster.add("decode", "d1", says("x"))]
        await cluster.see("d1")
        for worker in workers:
            await agree(cluster, worker)
        fresh = iter(NAMES)
        for _ in range(20):
            for worker in workers:
                messages: list[KVEvents] = []
                for _ in range(10):
                    old = draw.sample(list(worker.blocks._held), min(3, len(worker.blocks._held)))
                    messages.append(worker.blocks.change([next(fresh) for _ in range(8)], old))
                sent = [m for m in messages if draw.random() > 0.1] + draw.sample(messages, 2)
                draw.shuffle(sent)
                await worker.blocks.send(*sent)
                await asyncio.sleep(0)
        for worker in workers:
            await worker.blocks.store(next(fresh))  # a loss shows with the next message
            await agree(cluster, worker)
            assert worker.blocks.serial == 201
            assert len(worker.blocks.asked) > 1


async def test_a_large_snapshot_in_pages_while_events_go_on(nats_url: str) -> None:
    async with serving_http(nats_url, says("x")) as (cluster, _):
        bus = await cluster._stack.enter_async_context(await cluster._connect("d1"))
        d1 = ScriptedWorker(bus, "decode", "d1", says("x"))
        d1.blocks.change(NAMES[:10_000])
        d1.blocks.page_size = 1000
        coming = iter(NAMES[10_000:])

        async def goes_on(offset: int) -> None:
            await d1.blocks.store(*(next(coming) for _ in range(5)))

        d1.blocks.before_page = goes_on
        await cluster._stack.enter_async_context(d1)
        await until(lambda: "d1" in cluster.gateway.kv.index.holders, what="a snapshot")
        await agree(cluster, d1)


async def test_a_prefix_attracts_and_decode_prefills_itself_where_it_holds_nearly_all(nats_url: str) -> None:
    async with serving_http(nats_url, says("one two")) as (cluster, url):
        d1 = await cluster.add("decode", "d1", says("one two"))
        await cluster.see("d1")
        await d1.blocks.store(*names(PROMPT))
        await until(lambda: "d1" in cluster.gateway.kv.index.holders)
        await agree(cluster, d1)
        async with httpx.AsyncClient(timeout=20) as client:
            for prompt in (PROMPT, [*PROMPT[:64], *PROMPT[:100]]):
                response = await client.post(
                    f"{url}/v1/completions", json={"prompt": prompt, "cache_salt": "", "max_tokens": 9}
                )
                assert response.status_code == 400
                response = await client.post(
                    f"{url}/v1/completions",
                    json={"prompt": prompt, "max_tokens": 9},
                    headers={"X-Session-Id": "talk"},
                )
                assert response.status_code == 200, response.text
        [local, shipped] = d1.submitted
        assert (local.decode_worker, local.conversation) == (None, "talk")
        assert (shipped.decode_worker, shipped.holder, shipped.conversation) == ("d1", "d1", "talk")
        assert cluster.workers["p0"].submitted == [shipped]


async def test_events_lost_while_the_server_was_away_are_made_up_for(nats_server: EmbeddedNats) -> None:
    bucket = f"kv_events_{os.getpid()}"

    async def connect(name: str) -> NatsBus:
        return await NatsBus.connect(nats_server.url, name=name, registry_bucket=bucket)

    cluster = Cluster(connect)
    try:
        d0 = await cluster.add("decode", "d0", says("x"))
        await cluster.start_gateway()
        await cluster.see("d0")
        await d0.blocks.store(*NAMES[:50])
        await until(lambda: "d0" in cluster.gateway.kv.index.holders)
        await agree(cluster, d0)
        port = nats_server.port
        nats_server.kill()
        await until(lambda: not cluster.gateway_bus.connected and not d0.bus.connected)
        d0.blocks.change(NAMES[50:60], NAMES[:10])  # lost with the server
        with EmbeddedNats(port=port):
            await until(lambda: cluster.gateway_bus.connected and d0.bus.connected, 20)
            await d0.blocks.store(NAMES[70])
            await until(lambda: d0.blocks.asked != [0], what="the loss is seen")
            await agree(cluster, d0)
            await cluster.close()
    finally:
        await cluster.close()
