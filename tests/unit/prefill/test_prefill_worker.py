"""The prefill worker's loop with an engine that computes nothing: every way out of a job frees its blocks, once."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from distserve.bus.base import RegistryEvent
from distserve.errors import Draining, InvalidRequest, Overloaded, PeerLost
from distserve.messages import SamplingParams, SequenceKey
from tests.unit.prefill.prefill_side import ScriptedHandoff, World, running
from tests.waiting import until


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(World()) as w:
        yield w


async def test_the_first_token_never_waits_for_the_hand_over(world: World) -> None:
    world.submit("a", num_tokens=50)
    await until(lambda: world.chunk("a") is not None, what="token 0 is at the gateway")
    handoff = world.handoffs["a"]
    assert handoff.started
    assert not handoff.states
    assert world.worker.status_of(SequenceKey("a"), 1).phase == "handoff"
    assert world.pool.num_used == 4, "the blocks are kept until decode has adopted them"
    handoff.may_commit.set()
    await world.idle()
    (state,) = handoff.states
    assert (state.token_ids[50:], state.num_computed_tokens) == ([100], 50)
    assert world.worker.status_of(SequenceKey("a"), 0).phase == "unknown"
    written = sorted((s.layer_start, t) for s in handoff.spans for t in s.targets)
    assert written == [(layer, t) for layer in range(2) for t in range(4)]


async def test_a_sequence_of_one_token_stays_here(world: World) -> None:
    world.submit("a", sampling=SamplingParams(max_tokens=1))
    await until(lambda: world.chunk("a", ended=True) is not None)
    assert world.handoffs == {}
    await world.idle()


@pytest.mark.parametrize("stage", ["queued", "in a pass", "between chunks", "handoff"])
async def test_cancelled_at_any_stage_it_holds_nothing(world: World, stage: str) -> None:
    key = SequenceKey("a")
    world.runner.gate.clear()
    if stage == "queued":
        world.submit("first", num_tokens=16 * 20)  # takes the whole pool
        await until(world.runner.in_pass.is_set)
    world.submit("a", num_tokens=100)
    if stage in ("in a pass", "between chunks"):
        await until(world.runner.in_pass.is_set)
    if stage == "between chunks":
        world.runner.gate.set()
        await until(lambda: world.runner.num_passes >= 1)
    if stage == "handoff":
        world.runner.gate.set()
        await until(lambda: world.worker.status_of(key, 1).phase == "handoff")
    world.worker.cancel(key)
    world.worker.cancel(key)
    world.worker.cancel(SequenceKey("first"))
    world.runner.gate.set()
    await world.idle()
    assert world.worker.status_of(key, 0).phase == "unknown"
    assert all(h.aborted for h in world.handoffs.values())
    world.submit("next")
    world.handoffs.get("next", ScriptedHandoff()).may_commit.set()
    await until(lambda: world.chunk("next") is not None, what="the next one is served")
    world.worker.cancel(SequenceKey("next"))
    await world.idle()


async def test_a_hand_over_that_fails_ends_the_sequence_with_its_reason(world: World) -> None:
    world.submit("a")
    await until(lambda: "a" in world.handoffs)
    world.handoffs["a"].error = PeerLost("decode is gone")
    world.handoffs["a"].may_commit.set()
    assert await world.error_of("a") == "peer_lost: decode is gone"
    await world.idle()


async def test_a_failing_pass_ends_its_sequences_alone(world: World) -> None:
    world.runner.fail = RuntimeError("boom")
    world.submit("a")
    assert "boom" in await world.error_of("a")
    world.runner.fail = None
    world.submit("b", sampling=SamplingParams(max_tokens=1))
    await until(lambda: world.chunk("b", ended=True) is not None)
    await world.idle()


async def test_logits_that_are_no_numbers_end_it(world: World) -> None:
    world.submit("nan-a")
    assert "NaN" in await world.error_of("nan-a")
    await world.idle()


async def test_a_deadline_in_the_hand_over_ends_it(world: World) -> None:
    world.submit("a", deadline_s=0.05)
    assert (await world.error_of("a")).startswith("deadline_exceeded")
    await world.idle()


async def test_a_gateway_that_is_gone_takes_its_sequences_with_it(world: World) -> None:
    for name in ("a", "b"):
        world.submit(name)
    world.worker.on_registry(RegistryEvent("gone", "g", None, "expired"))
    await world.idle()


async def test_draining_waits_for_hand_overs_and_takes_nothing_new(world: World) -> None:
    world.submit("a")
    await until(lambda: world.worker.status_of(SequenceKey("a"), 1).phase == "handoff")
    draining = asyncio.create_task(world.worker.drain(5))
    await until(lambda: world.worker.status == "draining")
    with pytest.raises(Draining):
        world.submit("b")
    assert not draining.done()
    world.handoffs["a"].may_commit.set()
    await draining
    await world.idle()


async def test_draining_ends_what_does_not_end_in_time(world: World) -> None:
    world.submit("a")
    await until(lambda: world.worker.status_of(SequenceKey("a"), 1).phase == "handoff")
    await world.worker.drain(0.01)
    assert (await world.error_of("a")).startswith("draining")
    await world.idle()


async def test_what_can_never_be_served_is_refused_at_once(world: World) -> None:
    with pytest.raises(InvalidRequest, match="needs 24 KV blocks, this prefill worker has 20"):
        world.submit("a", num_tokens=380)
    with pytest.raises(InvalidRequest, match="has 400 tokens"):
        world.submit("a", num_tokens=400)
    world.runner.gate.clear()
    for i in range(4):
        world.submit(str(i), num_tokens=300)
        await until(lambda: world.worker.load().num_running == 1)
    with pytest.raises(Overloaded, match="3 sequences wait here, the limit is 3"):
        world.submit("more")
    for i in range(4):
        world.worker.cancel(SequenceKey(str(i)))
    world.runner.gate.set()
    await world.idle()


async def test_token_0_can_be_left_to_decode() -> None:
    async with running(World(sample_on_decode=True)) as w:
        w.submit("a")
        await until(lambda: "a" in w.handoffs)
        w.handoffs["a"].may_commit.set()
        await w.idle()
        (state,) = w.handoffs["a"].states
        assert state.token_ids == [7] * 20
        assert (state.last_hidden, state.last_hidden_dtype) == (b"h" * 16, "float32")
        assert w.chunks == []
