"""The prefill worker's loop with an engine that computes nothing: every way out of a job frees its blocks, once."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from distserve.bus.base import RegistryEvent
from distserve.errors import Draining, InvalidRequest, Overloaded, PeerLost, SloUnattainable
from distserve.messages import PassSpeed, SamplingParams, SequenceKey, Slo, WorkerInfo, decode_as, encode
from distserve.worker import engine_thread, pass_model
from tests.unit.prefill.clockwork import known
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


# ---------------------------------------------------------------- promises

ONE = SamplingParams(max_tokens=1)  # ends with its first token: no hand-over
SLOW = PassSpeed(pass_s=10.0, token_s=0.001)


async def test_what_is_left_of_a_promise_goes_on_with_the_sequence(world: World) -> None:
    world.submit("a", slo=Slo(priority="vip", ttft_s=5.0, tpot_s=0.05))
    await until(lambda: "a" in world.handoffs)
    world.handoffs["a"].may_commit.set()
    await world.idle()
    (state,) = world.handoffs["a"].states
    assert (state.slo.priority, state.slo.tpot_s) == ("vip", 0.05)
    assert state.slo.ttft_s is not None
    assert state.slo.ttft_s < 5.0


async def test_a_promise_that_cannot_be_kept_is_refused_at_once_and_nothing_is_held_for_it() -> None:
    async with running(World(model=known(SLOW))) as w:
        with pytest.raises(SloUnattainable, match="even if nothing else is to be done"):
            w.submit("a", slo=Slo(ttft_s=1.0))
        assert w.worker.status_of(SequenceKey("a"), 0).phase == "unknown"
        assert len(w.outbox) == 0
        await w.idle()
        w.runner.gate.clear()
        assert w.submit("b", sampling=ONE, slo=Slo(ttft_s=15.0)).ttft_s == pytest.approx(10.02, rel=1e-3)
        await until(w.runner.in_pass.is_set)
        with pytest.raises(SloUnattainable) as e:
            w.submit("c", slo=Slo(ttft_s=15.0))
        assert 0 < e.value.retry_after_s < 10.1
        w.runner.gate.set()
        await until(lambda: w.chunk("b", ended=True) is not None)
        await w.idle()


async def test_who_was_promised_nothing_is_told_when_its_first_token_comes() -> None:
    async with running(World(model=known(SLOW))) as w:
        w.runner.gate.clear()
        assert w.submit("a", num_tokens=60, sampling=ONE).ttft_s == pytest.approx(20.06, rel=1e-3), "in two chunks"
        load = w.worker.load()
        assert (load.speed, load.pass_tokens) == (w.model.speed, 64)
        assert max(step.work_s for step in load.backlog) > 1
        info = WorkerInfo(worker_id="p", role="prefill", load=load)
        assert decode_as(WorkerInfo, encode(info)) == info
        w.worker.cancel(SequenceKey("a"))
        w.runner.gate.set()
        await w.idle()


async def test_passes_that_worked_teach_how_long_they_take_and_one_that_failed_does_not(world: World) -> None:
    assert world.submit("a", sampling=ONE, slo=Slo(ttft_s=1e-6)).ttft_s is None, "nobody knows yet"
    await until(lambda: world.chunk("a", ended=True) is not None)
    assert world.model.speed.known
    assert world.model.num_passes == 1
    assert not world.worker.load().speed.known, "one pass tells too little to build promises on"
    world.runner.fail = RuntimeError("boom")
    world.submit("b")
    await world.error_of("b")
    assert world.model.num_passes == 1
    await world.idle()


async def test_a_pass_has_taken_what_it_took_on_its_thread_however_busy_the_loop_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([7.0, 7.25])
    monkeypatch.setattr(engine_thread, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    world.submit("a", sampling=ONE)
    await until(lambda: world.chunk("a", ended=True) is not None)
    assert world.model.speed.seconds(20) == pytest.approx(0.25)
    await world.idle()


async def test_a_deadline_in_mid_prompt_lets_no_further_chunk_be_computed(world: World) -> None:
    world.runner.gate.clear()
    world.submit("a", num_tokens=200, deadline_s=0.05)
    await until(world.runner.in_pass.is_set)
    assert (await world.error_of("a")).startswith("deadline_exceeded")
    assert world.runner.num_passes == 0, "its gateway is told before the pass has ended"
    world.runner.gate.set()
    await world.idle()
    assert world.runner.num_passes == 1


async def test_outputs_of_one_prompt_are_predicted_as_computed_once() -> None:
    async with running(World(model=known(PassSpeed(pass_s=0.5, token_s=0.001)))) as w:
        w.runner.gate.clear()
        told = [
            w.submit(str(i), num_tokens=100, token_ids=list(range(100)), sampling=ONE, slo=Slo(ttft_s=4.0)).ttft_s
            for i in range(3)
        ]
        assert told[0] == pytest.approx(4 * 0.5 + 0.1, rel=1e-3), "four chunks"
        assert told[2] is not None
        assert told[2] < 4 * 0.5 + 0.6
        w.runner.gate.set()
        for i in range(3):
            await until(lambda i=i: w.chunk(str(i), ended=True) is not None)  # type: ignore[misc]
        await w.idle()


async def test_what_the_gateway_says_another_has_is_predicted_as_had_and_what_the_store_may_have_is_not() -> None:
    async with running(World(model=known(PassSpeed(pass_s=0.5, token_s=0.001)))) as w:
        w.store.num_blocks = 6
        slo = Slo(ttft_s=1.0)
        with pytest.raises(SloUnattainable):
            w.submit("a", num_tokens=100, token_ids=list(range(100)), sampling=ONE, slo=slo)
        w.submit("b", num_tokens=100, token_ids=list(range(100)), sampling=ONE, slo=slo, holder="d")
        await until(lambda: w.chunk("b", ended=True) is not None)
        await w.idle()


async def test_a_worker_that_fetches_for_one_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of many that fetch would be taken to find out how fast it is."""
    monkeypatch.setattr(pass_model, "PROBE_S", 1e-9)
    async with running(World(model=known(SLOW))) as w:
        assert not w.worker.load().speed.known
        w.store.num_blocks = 6
        w.store.may_come.clear()
        w.submit("a", num_tokens=100, token_ids=list(range(100)), sampling=ONE, slo=Slo(ttft_s=1.0))
        await until(lambda: bool(w.store.fetched_to))
        assert w.worker.load().speed == w.model.speed
        with pytest.raises(SloUnattainable):
            w.submit("b", num_tokens=100, token_ids=list(range(100)), sampling=ONE, slo=Slo(ttft_s=1.0))
        w.store.may_come.set()
        await until(lambda: w.chunk("a", ended=True) is not None)
        await w.idle()


async def test_what_is_fetched_for_another_is_not_forgotten_in_the_prediction() -> None:
    async with running(World(model=known(PassSpeed(pass_s=0.5, token_s=0.001)))) as w:
        w.store.num_blocks = 6
        w.store.may_come.clear()
        w.submit("a", num_tokens=100, token_ids=list(range(100)), sampling=ONE)
        await until(lambda: bool(w.store.fetched_to))
        later = w.submit("b", num_tokens=20, sampling=ONE, slo=Slo(ttft_s=3.0)).ttft_s
        assert later == pytest.approx(0.5 + 0.020 + 0.032, rel=1e-3), "a chunk of it is in the same pass"
        w.store.may_come.set()
        for name in "ab":
            await until(lambda name=name: w.chunk(name, ended=True) is not None)  # type: ignore[misc]
        await w.idle()
