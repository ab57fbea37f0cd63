"""Of who has left the registry nothing is kept, however late it comes: nobody would forget it again."""

import asyncio

import pytest

from distserve.messages import FetchRequest, PrefixRequest
from distserve.worker.store.detours import Detours
from tests.unit.worker.store.peers import chain, config, net
from tests.waiting import until


async def test_a_node_that_leaves_while_it_is_asked_is_not_noted_as_silent() -> None:
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", setup=config(lookup_timeout_s=0.2))
        frozen = asyncio.Event()
        node.on_message = lambda m: frozen.wait() if isinstance(m, PrefixRequest) else None
        lookup = asyncio.create_task(worker.store.client.lookup(chain(8), 0))
        await until(lambda: len(node.heard) == 1)
        await node.leave()
        assert not await lookup
        assert worker.store.counts.num_silent == 1
        assert worker.store.client._nodes.num_silent == 0
        frozen.set()


async def test_one_that_was_silent_and_leaves_is_forgotten() -> None:
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", setup=config(lookup_timeout_s=0.1))
        frozen = asyncio.Event()
        node.on_message = lambda m: frozen.wait()
        assert not await worker.store.client.lookup(chain(8), 0)
        assert worker.store.client._nodes.num_silent == 1
        await node.leave()
        assert worker.store.client._nodes.num_silent == 0
        frozen.set()


@pytest.mark.parametrize("left", [False, True])
async def test_transports_are_noted_of_those_that_are_there(left: bool) -> None:
    """Or not: who fetches has left the registry by the time that all is sent."""
    async with net() as n:
        holder, worker = await n.peer("holder"), await n.peer("worker")
        c = chain(8)
        holder.holds(c)
        found = await worker.store.client.lookup(c, 0, holder="holder")

        async def leave() -> None:
            await worker.leave()

        holder.on_message = lambda m: leave() if left and isinstance(m, FetchRequest) else None
        ours = worker.pool.allocate(8)
        assert await worker.store.client.fetch(found, ours, timeout_s=5) == 8
        await until(lambda: holder.at_rest)
        assert list(holder.plane.in_use.snapshot()) == ([] if left else ["worker"])
        assert list(worker.plane.in_use.snapshot()) == ["holder"]


def test_a_transport_that_fails_with_who_has_left_is_not_noted() -> None:
    here = {"a"}
    detours = Detours(here.__contains__)
    assert detours.failed("a", "shm", ["shm", "tcp"])
    assert detours.kinds("a", ["shm", "tcp"]) == ["tcp"]
    assert not detours.failed("b", "shm", ["shm", "tcp"])
    assert len(detours) == 1
    detours.forget("a")
    assert len(detours) == 0
