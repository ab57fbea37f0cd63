"""Tokens on their way out: one message a gateway a step, and kept until acknowledged."""

import asyncio
from typing import Any

import pytest

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.errors import DistServeError
from distserve.messages import SequenceKey, Timings, TokenBatch, TokenLogprob, decode_as
from distserve.worker.outbox import Outbox

A, B, C = SequenceKey("a"), SequenceKey("b"), SequenceKey("c", 1)


class Listener:
    def __init__(self) -> None:
        self.batches: list[TokenBatch] = []
        self.caught_up = asyncio.Event()

    async def __call__(self, delivery: Delivery) -> None:
        if not delivery.data:  # a marker: all that was published before it has come
            self.caught_up.set()
            return
        self.batches.append(decode_as(TokenBatch, delivery.data))


class World:
    def __init__(self, max_payload_bytes: int = 1024 * 1024) -> None:
        self.now = 0.0
        hub = MemoryHub(max_payload_bytes=max_payload_bytes)
        self.bus = MemoryBus(hub)
        self.outbox = Outbox(self.bus, "w", forget_s=60, clock=lambda: self.now)
        self.heard = {"g1": Listener(), "g2": Listener()}

    async def open(self) -> "World":
        for name, listener in self.heard.items():
            await self.bus.subscribe(subjects.stream(name), listener, inline=True)
        self.outbox.open(A, "g1")
        self.outbox.open(B, "g1", with_logprobs=True)
        self.outbox.open(C, "g2", first=5)
        return self

    async def flush(self) -> None:
        await self.outbox.flush()
        for name, listener in self.heard.items():
            listener.caught_up.clear()
            await self.bus.publish(subjects.stream(name), b"")
            await asyncio.wait_for(listener.caught_up.wait(), 5)


@pytest.fixture
async def world() -> World:
    return await World().open()


async def test_a_step_is_one_message_for_each_gateway(world: World) -> None:
    for key in (A, B, C):
        world.outbox.append(key, 7, TokenLogprob(7, -1.0))
    await world.flush()
    (batch,) = world.heard["g1"].batches
    assert [(c.key, c.start, c.token_ids) for c in batch.chunks] == [(A, 0, [7]), (B, 0, [7])]
    assert [c.logprobs for c in batch.chunks] == [None, [TokenLogprob(7, -1.0)]]
    (other,) = world.heard["g2"].batches
    assert [(c.start, c.token_ids) for c in other.chunks] == [(5, [7])]


async def test_serials_grow_by_one_for_each_gateway(world: World) -> None:
    for _ in range(3):
        world.outbox.append(A, 1)
        await world.flush()
    world.outbox.append(C, 1)
    await world.flush()
    assert [b.serial for b in world.heard["g1"].batches] == [1, 2, 3]
    assert [b.serial for b in world.heard["g2"].batches] == [1]


async def test_a_flush_without_news_sends_nothing(world: World) -> None:
    await world.flush()
    assert not world.heard["g1"].batches


async def test_only_new_tokens_travel_and_all_can_be_asked_for(world: World) -> None:
    for token in (1, 2, 3):
        world.outbox.append(A, token)
        await world.flush()
    chunks = [c for b in world.heard["g1"].batches for c in b.chunks]
    assert [(c.start, c.token_ids) for c in chunks] == [(0, [1]), (1, [2]), (2, [3])]
    lacks_two = world.outbox.since(A, 1)
    assert lacks_two is not None
    assert (lacks_two.start, lacks_two.token_ids) == (1, [2, 3])
    assert world.outbox.since(A, 3) is None
    assert world.outbox.since(SequenceKey("never"), 0) is None


async def test_the_end_is_asked_for_again_until_it_is_acknowledged(world: World) -> None:
    world.outbox.append(C, 4)
    world.outbox.finish(C, "stop", timings=Timings(decode_s=2.0))
    world.outbox.finish(C, "length")  # the first end counts
    await world.flush()
    for position, tokens in ((5, [4]), (6, [])):
        chunk = world.outbox.since(C, position)
        assert chunk is not None
        assert (chunk.token_ids, chunk.finish_reason, chunk.timings) == (tokens, "stop", Timings(decode_s=2.0))
    world.outbox.drop([C])
    assert world.outbox.since(C, 5) is None


async def test_an_error_travels_as_code_message_and_fields(world: World) -> None:
    world.outbox.finish(A, "error", error=DistServeError("boom", layer=3))
    await world.flush()
    (chunk,) = world.heard["g1"].batches[0].chunks
    assert (chunk.finish_reason, chunk.error) == ("error", ("internal_error", "boom", {"layer": 3}))


async def test_ends_nobody_acknowledged_are_forgotten_and_live_ones_are_not(world: World) -> None:
    world.outbox.append(A, 1)
    world.outbox.finish(A, "stop")
    world.outbox.append(B, 1)
    world.now = 61.0
    world.outbox.forget_old()
    assert A not in world.outbox
    assert B in world.outbox


async def test_tokens_of_a_cut_off_bus_can_be_asked_for_afterwards() -> None:
    world = await World().open()
    await world.bus.close()
    world.outbox.append(A, 1)
    await world.outbox.flush()
    chunk = world.outbox.since(A, 0)
    assert chunk is not None
    assert chunk.token_ids == [1]


async def test_a_flush_that_the_bus_holds_up_is_overtaken_by_no_other(world: World, monkeypatch: Any) -> None:
    publish, free, held = world.bus.publish, asyncio.Event(), asyncio.Event()

    async def slow(subject: str, data: bytes) -> None:
        held.set()
        await free.wait()
        await publish(subject, data)

    monkeypatch.setattr(world.bus, "publish", slow)
    world.outbox.append(A, 1)
    first = asyncio.create_task(world.outbox.flush())
    await asyncio.wait_for(held.wait(), 5)
    monkeypatch.setattr(world.bus, "publish", publish)
    world.outbox.append(A, 2)
    second = asyncio.create_task(world.outbox.flush())
    await asyncio.sleep(0)  # it has begun
    world.outbox.append(A, 3)
    assert not second.done()
    free.set()
    await asyncio.wait_for(asyncio.gather(first, second), 5)
    await world.flush()
    batches = world.heard["g1"].batches
    assert [(b.serial, c.start, c.token_ids) for b in batches for c in b.chunks] == [(1, 0, [1]), (2, 1, [2, 3])]


async def test_a_chunk_too_large_for_the_bus_ends_alone_and_the_others_pass() -> None:
    world = World(max_payload_bytes=2000)
    await world.open()
    for key in (A, B):
        world.outbox.append(key, 5, TokenLogprob(5, -0.5))
    world.outbox.append(A, 6, prompt_logprobs=[TokenLogprob(i, -1.0, ((i, -1.0),)) for i in range(200)])
    await world.flush()
    chunks = {c.key: c for b in world.heard["g1"].batches for c in b.chunks}
    assert (chunks[B].token_ids, chunks[B].finish_reason) == ([5], None)
    assert chunks[A].finish_reason == "error"
    assert chunks[A].error is not None
    assert chunks[A].error[0] == "payload_too_large"
    assert [b.serial for b in world.heard["g1"].batches] == sorted(b.serial for b in world.heard["g1"].batches)
