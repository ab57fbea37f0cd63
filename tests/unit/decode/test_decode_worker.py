"""The decode worker's loop with an engine that computes nothing: faults at every stage, and every block comes back."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from distserve.bus.base import RegistryEvent
from distserve.engine.batching import Batch, Sampled
from distserve.errors import AlreadyAdopted, Cancelled, DistServeError
from distserve.messages import (
    SamplingParams,
    SequenceKey,
    Slo,
    SubmitRequest,
    TokenLogprob,
)
from tests.unit.decode.decode_world import World, running
from tests.unit.decode.test_reservations import ask
from tests.waiting import until


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(World()) as w:
        yield w


async def test_an_adopted_sequence_is_decoded_to_its_end(world: World) -> None:
    await world.hand_over("a")
    await until(lambda: world.end("a") is not None)
    assert world.tokens("a") == [100 + i for i in range(8)]
    await world.idle()


async def test_a_sequence_that_preempted_itself_goes_on_when_a_lease_gives_its_blocks_back(world: World) -> None:
    world.runner.gate.clear()
    held = await world.worker.lease(ask("b", 6))  # commits nothing
    await world.hand_over("a", num_tokens=16 * 10, max_tokens=40)
    others = world.pool.allocate(3)  # all but one block are taken, when three more are expected to be needed
    await until(world.runner.in_pass.is_set)
    world.runner.gate.set()
    await until(lambda: world.worker.load().num_waiting == 1, what="the only sequence preempted itself")
    world.pool.free(others)
    world.reservations.release(held.region.lease_id, held.region.epoch, "given up")
    await until(lambda: world.end("a") is not None, what="it went on")
    assert world.tokens("a") == [100 + i for i in range(40)]
    await world.idle()


async def test_one_that_waits_for_room_is_served_after_a_readmission() -> None:
    async with running(World(num_blocks=12)) as w:
        await w.hand_over("a", num_tokens=16 * 6, max_tokens=60)
        waiter = asyncio.create_task(w.hand_over("b", num_tokens=16 * 6, max_tokens=4))
        await until(lambda: w.end("a") is not None and w.end("b") is not None)
        await waiter
        assert w.tokens("b") == [100, 101, 102, 103]
        await w.idle()


async def test_what_a_sequence_was_promised_comes_with_it_and_its_end_is_learnt_from(world: World) -> None:
    world.runner.gate.clear()
    await world.hand_over("a", slo=Slo(priority="vip", tpot_s=0.05))
    await until(world.runner.in_pass.is_set)
    (sequence,) = world.scheduler.running
    assert world.scheduler.standing(sequence).slo == Slo(priority="vip", tpot_s=0.05)
    world.runner.gate.set()
    for i in range(16):
        await world.hand_over(str(i), max_tokens=5)
    await until(lambda: world.scheduler.lengths.known)
    assert world.scheduler.lengths.expected(1, 1000) == 5
    await world.idle()


async def test_its_load_tells_how_fast_it_is_and_how_many_it_runs(world: World) -> None:
    assert (world.worker.load().step_s, world.worker.load().speed.known) == (0.0, False)
    await world.hand_over("a")
    await until(lambda: world.end("a") is not None)
    load = world.worker.load()
    assert 0 < load.step_s < 10
    assert (load.max_num_seqs, load.pass_tokens, load.backlog) == (8, 32, [])
    assert not load.speed.known, "of prompts it has computed none"
    world.worker.submit(
        SubmitRequest(
            key=SequenceKey("c"),
            model="m",
            gateway="g",
            token_ids=[7] * 246,  # of which "a" has left 16: eight passes, the last of them of 6 tokens
            num_prompt_tokens=246,
            sampling=SamplingParams(max_tokens=5),
        )
    )
    await until(lambda: world.end("c") is not None)
    assert world.worker.load().speed.known
    await world.idle()


async def test_tokens_leave_while_the_next_pass_computes() -> None:
    async with running(World(), reap_s=60) as w:  # which sends too
        w.runner.gate.clear()
        await w.hand_over("a")
        await until(lambda: w.tokens("a") == [100], what="token 0 is out")
        assert (w.runner.in_pass.is_set(), w.runner.num_passes) == (True, 0)
        w.runner.gate.set()
        await until(lambda: w.end("a") is not None, what="the end is out before the loop sleeps")
        assert w.tokens("a") == [100 + i for i in range(8)]
        await w.idle()


async def test_a_pass_begins_though_the_bus_is_held_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, free = world.bus.publish, asyncio.Event()

    async def slow(subject: str, data: bytes) -> None:
        await free.wait()
        await publish(subject, data)

    monkeypatch.setattr(world.bus, "publish", slow)
    await world.hand_over("a")
    await until(lambda: world.runner.num_passes == 1, what="the first pass did not wait for the bus")
    await world.hand_over("b", max_tokens=3)
    free.set()
    await until(lambda: world.end("a") is not None and world.end("b") is not None)
    assert (world.tokens("a"), world.tokens("b")) == ([100 + i for i in range(8)], [100, 101, 102])
    await world.idle()


async def test_a_pass_that_fails_before_it_has_begun_ends_its_sequences_and_what_they_had_is_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batch: Batch, **_: object) -> list[Sampled]:
        raise RuntimeError("no tensors")

    with monkeypatch.context() as patched:
        patched.setattr(world.runner, "execute", broken)
        await world.hand_over("a")
        await until(lambda: world.end("a") is not None)
    end = world.end("a")
    assert end is not None
    assert end.error is not None
    assert "no tensors" in end.error[1]
    assert world.tokens("a") == [100]
    await world.hand_over("b")
    await until(lambda: world.end("b") is not None)
    assert world.tokens("b") == [100 + i for i in range(8)]
    await world.idle()


async def test_cancelled_in_mid_pass_its_blocks_return_after_the_pass(world: World) -> None:
    world.runner.gate.clear()
    await world.hand_over("a")
    await until(world.runner.in_pass.is_set)
    world.worker.cancel(SequenceKey("a"))
    assert world.pool.num_used > 0
    world.runner.gate.set()
    await world.idle()
    assert world.end("a") is None


async def test_cancelled_before_its_commit_it_is_refused_and_holds_nothing(world: World) -> None:
    grant = await world.worker.lease(ask("a", 2))
    world.worker.cancel(SequenceKey("a"))
    with pytest.raises(DistServeError):
        world.commit("a", grant)
    with pytest.raises(Cancelled):
        await world.worker.lease(ask("a", 2))
    await world.idle()


async def test_a_second_hand_over_of_a_sequence_is_told_that_it_is_here(world: World) -> None:
    await world.hand_over("a", max_tokens=3)
    with pytest.raises(AlreadyAdopted):
        await world.worker.lease(ask("a", 2))
    await until(lambda: world.end("a") is not None)
    with pytest.raises(AlreadyAdopted):
        await world.worker.lease(ask("a", 2))
    await world.idle()


async def test_a_state_that_does_not_fit_its_lease_is_refused_and_its_blocks_return(world: World) -> None:
    grant = await world.worker.lease(ask("a", 2))
    with pytest.raises(DistServeError, match="KV of 200"):
        world.commit("a", grant, num_computed_tokens=200, token_ids=[7] * 201, num_prompt_tokens=200)
    await world.idle()


async def test_a_failing_pass_ends_its_sequences_with_the_reason_and_the_next_one_runs(world: World) -> None:
    world.runner.fail = RuntimeError("boom")
    await world.hand_over("a")
    await until(lambda: world.end("a") is not None)
    end = world.end("a")
    assert end is not None
    assert end.error is not None
    assert "boom" in end.error[1]
    world.runner.fail = None
    await world.hand_over("b")
    await until(lambda: world.end("b") is not None)
    await world.idle()


async def test_logits_that_are_no_numbers_end_one_sequence_alone(world: World) -> None:
    await world.hand_over("nan-1", max_tokens=30)
    await world.hand_over("b")
    await until(lambda: world.end("nan-1") is not None and world.end("b") is not None)
    end = world.end("nan-1")
    assert end is not None
    assert end.error is not None
    assert "NaN" in end.error[1]
    assert world.tokens("b") == [100 + i for i in range(8)]
    await world.idle()


async def test_token_0_is_drawn_here_if_prefill_did_not_and_prompt_logprobs_stay(world: World) -> None:
    known = [TokenLogprob(7, -1.5)] * 19
    await world.hand_over("a", token_ids=[7] * 20, last_hidden=b"h" * 16, prompt_logprobs=known, num_cached_tokens=5)
    await until(lambda: world.end("a") is not None)
    assert world.tokens("a") == [100 + i for i in range(8)]
    first = next(c for c in world.chunks if c.start == 0)
    assert first.prompt_logprobs == known
    assert first.num_cached_tokens == 5
    await world.idle()


async def test_those_whose_token_0_is_being_drawn_have_their_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(World(max_num_seqs=2)) as w:
        drawing, may_end = threading.Event(), threading.Event()
        real = w.runner.sample_from_hidden

        def slowly(*of: Any) -> Sampled:
            drawing.set()
            assert may_end.wait(10)
            return real(*of)

        monkeypatch.setattr(w.runner, "sample_from_hidden", slowly)
        for name in "ab":
            await w.hand_over(name, token_ids=[7] * 20, last_hidden=b"h" * 16)
        await until(drawing.is_set)
        assert not w.worker.may_grant()
        assert w.scheduler.room.num_seats == 0
        w.worker.cancel(SequenceKey("b"))  # not the one that the engine has
        assert w.scheduler.room.num_seats == 1
        may_end.set()
        await until(lambda: w.end("a") is not None)
        assert w.end("b") is None
        await w.idle()


async def test_a_deadline_ends_it_with_an_error(world: World) -> None:
    world.runner.gate.clear()
    await world.hand_over("a", deadline_s=0.05, max_tokens=300, token_ids=[7] * 20 + [100])
    await until(lambda: world.end("a") is not None)
    world.runner.gate.set()
    end = world.end("a")
    assert end is not None
    assert end.error is not None
    assert end.error[0] == "deadline_exceeded"
    await world.idle()


async def test_a_gateway_that_is_gone_takes_its_sequences_with_it(world: World) -> None:
    world.runner.gate.clear()
    await world.hand_over("a", max_tokens=200)
    world.worker.on_registry(RegistryEvent("gone", "g", None, "expired"))
    world.runner.gate.set()
    await world.idle()


async def test_draining_ends_what_does_not_end_in_time_with_an_error(world: World) -> None:
    world.runner.gate.clear()
    await world.hand_over("a", max_tokens=200)
    await until(world.runner.in_pass.is_set)
    draining = asyncio.create_task(world.worker.drain(0.05))
    await until(lambda: world.worker.status == "draining")
    with pytest.raises(DistServeError):
        await world.worker.lease(ask("b", 2))
    await until(lambda: world.end("a") is not None or draining.done())
    world.runner.gate.set()
    await draining
    end = world.end("a")
    assert end is not None
    assert end.error is not None
    assert end.error[0] == "draining"
    await world.idle()


async def test_a_prompt_computed_here_is_chunked_and_answered(world: World) -> None:
    key, sampling = SequenceKey("c"), SamplingParams(max_tokens=5)
    request = SubmitRequest(
        key=key, model="m", gateway="g", token_ids=[7] * 100, num_prompt_tokens=100, sampling=sampling
    )
    world.worker.submit(request)
    world.worker.submit(request)  # a repeated request has no further effect
    await until(lambda: world.end("c") is not None)
    assert world.tokens("c") == [100 + i for i in range(5)]
    assert world.runner.num_passes == 4 + 4  # 32 + 32 + 32 + 4 tokens, then four steps
    await world.idle()
