"""Prompts that a decode worker must compute itself, whatever their length, since no prefill worker is there."""

import asyncio
import random

import pytest

from distserve.errors import Overloaded, SloUnattainable
from distserve.messages import SequenceKey, Slo
from tests.unit.decode.decode_world import World, ask_for, running
from tests.unit.decode.test_reservations import ask
from tests.waiting import until

PROMPT = random.Random(3).choices(range(1000), k=300)


async def test_any_prompt_is_computed_in_chunks() -> None:
    async with running(World(colocated=False, max_local=0)) as w:
        w.submit("a", PROMPT[:200], may_queue=True)
        await w.ended("a")
        assert w.tokens("a") == [100 + i for i in range(8)]
        assert w.runner.num_passes == 7 + 7
        await w.idle()


async def test_those_that_find_no_room_wait_and_a_full_queue_refuses() -> None:
    async with running(World(colocated=False, max_num_seqs=1, max_waiting=2)) as w:
        w.runner.gate.clear()
        w.submit("a", PROMPT[:40], may_queue=True)
        await until(w.runner.in_pass.is_set)
        w.submit("b", PROMPT[100:140], may_queue=True)
        w.submit("c", PROMPT[150:190], may_queue=True)
        assert w.worker.load().num_waiting == 2
        assert w.worker.status_of(SequenceKey("c"), 0).phase == "queued"
        with pytest.raises(Overloaded, match="2 sequences wait here, the limit is 2"):
            w.submit("d", PROMPT[:40], may_queue=True)
        w.runner.gate.set()
        await w.ended("a", "b", "c")
        await w.idle()


async def test_hand_overs_are_not_kept_out_by_prompts_that_wait() -> None:
    async with running(World(num_blocks=40, colocated=False, max_num_seqs=2, max_waiting=8)) as w:
        w.runner.gate.clear()
        w.submit("first", PROMPT[:40], may_queue=True, slo=Slo(priority="normal"))
        await until(w.runner.in_pass.is_set)
        for i in range(5):
            w.submit(str(i), PROMPT[50 + i : 100 + i], may_queue=True)
        grant = await asyncio.wait_for(w.worker.lease(ask_for("b", PROMPT[:70])), 5)
        w.commit("b", grant, 70, token_ids=[*PROMPT[:70], 100])
        w.runner.gate.set()
        await w.ended("first", "b", *map(str, range(5)))
        await w.idle()


async def test_a_sequence_that_runs_goes_on_beside_a_long_prompt() -> None:
    async with running(World(num_blocks=40, colocated=False, chunk_tokens=16)) as w:
        await w.hand_over("steady", max_tokens=60)
        await until(lambda: len(w.tokens("steady")) > 3)
        w.submit("a", PROMPT[:300], may_queue=True)
        before = len(w.tokens("steady"))
        await until(lambda: bool(w.tokens("a")))
        assert len(w.tokens("steady")) >= min(60, before + 300 // 16 - 2)
        await w.ended("a", "steady")
        await w.idle()


@pytest.mark.parametrize("stage", ["fetching", "waiting", "computing"])
async def test_cancelled_at_any_stage_it_is_gone(stage: str) -> None:
    async with running(World(colocated=False, max_num_seqs=1)) as w:
        w.runner.gate.clear()
        if stage == "fetching":
            w.store.num_blocks = 5
            w.store.may_come.clear()
        if stage == "waiting":
            await w.hand_over("other", max_tokens=100)
            await until(w.runner.in_pass.is_set)
        w.submit("a", PROMPT[:200], may_queue=True)
        if stage == "fetching":
            await until(lambda: w.store.num_writing == 1)
        if stage == "computing":
            await until(w.runner.in_pass.is_set)
        w.worker.cancel(SequenceKey("a"))
        if stage != "computing":
            assert w.worker.load().num_waiting == 0
        w.runner.gate.set()
        w.worker.cancel(SequenceKey("other"))
        await w.idle()
        assert w.tokens("a") == []


async def test_an_urgent_prompt_goes_between_two_chunks_of_a_long_one() -> None:
    async with running(World(num_blocks=40)) as w:
        w.runner.gate.clear()
        w.submit("long", PROMPT[:300], slo=Slo(priority="batch"))
        await until(w.runner.in_pass.is_set)
        w.submit("urgent", PROMPT[200:260], slo=Slo(priority="vip", ttft_s=5))
        w.runner.gate.set()
        await w.ended("long", "urgent")
        assert next(c.key.request_id for c in w.chunks if c.token_ids) == "urgent"
        await w.idle()


async def test_a_promise_that_it_cannot_keep_is_refused_at_once_and_others_are_told_when() -> None:
    async with running(World(num_blocks=40)) as w:
        w.submit("a", PROMPT[:230])  # by whose eight passes it learns what a prompt takes
        await w.ended("a")
        with pytest.raises(SloUnattainable) as refused:
            w.submit("b", PROMPT[230:300], slo=Slo(ttft_s=1e-9))
        assert refused.value.ttft_s > 1e-9
        assert w.worker.load().num_waiting == 0
        assert SequenceKey("b") not in w.outbox
        w.submit("c", PROMPT[100:300], slo=Slo(ttft_s=600))
        await w.ended("c")
        await w.idle()


async def test_a_prompt_that_let_a_hand_over_go_first_begins_when_that_gives_up_or_has_its_room() -> None:
    async with running(World(colocated=False)) as w:
        await w.worker.lease(ask("holder", 10))
        given_up = asyncio.create_task(w.worker.lease(ask("big", 12, wait_s=0.3)))
        await until(lambda: w.reservations.num_waiting == 1)
        w.submit("a", PROMPT[:40], may_queue=True, max_tokens=2)
        assert w.worker.status_of(SequenceKey("a"), 0).phase == "queued"
        await w.ended("a")
        with pytest.raises(Overloaded):
            await given_up
        granted = asyncio.create_task(w.worker.lease(ask("big", 12)))
        await until(lambda: w.reservations.num_waiting == 1)
        w.submit("b", PROMPT[:40], may_queue=True, max_tokens=2)
        assert w.worker.status_of(SequenceKey("b"), 0).phase == "queued"
        w.worker.cancel(SequenceKey("holder"))
        await w.ended("b")
        assert len((await granted).region.block_ids) == 12
        w.worker.cancel(SequenceKey("big"))
        await w.idle()
