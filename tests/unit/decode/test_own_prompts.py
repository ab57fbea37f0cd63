"""Prompts that a decode worker computes itself: which it takes, what it need not compute, and where they stand."""

import asyncio
import random
from typing import Any

import pytest

from distserve.errors import DistServeError, Draining, Overloaded
from distserve.messages import SequenceKey
from tests.unit.decode.decode_world import World, ask_for, running
from tests.unit.decode.test_reservations import ask
from tests.waiting import until

PROMPT = random.Random(3).choices(range(1000), k=300)


async def conversation(w: World, num_tokens: int = 100) -> None:
    """The pool holds PROMPT[:num_tokens], but for its last partial block."""
    await w.hand_over_prompt("before", PROMPT[:num_tokens], max_tokens=2)
    await w.ended("before")


async def test_a_prompt_that_is_here_but_for_its_end_is_computed_here() -> None:
    async with running(World(colocated=False, max_local=64)) as w:
        await conversation(w)
        w.submit("a", PROMPT[:160])
        w.submit("a", PROMPT[:160])  # a repeated request has no further effect
        await w.ended("a")
        assert w.tokens("a") == [100 + i for i in range(8)]
        assert w.cached("a") == 96
        assert (w.prefixes.num_tokens, w.prefixes.num_cached_tokens) == (160, 96)
        assert w.found(PROMPT[:160]) == 10
        (offered,) = w.store.offers
        assert len(offered.hashes) == 4, "what was computed, not what was found"
        await w.idle()


@pytest.mark.parametrize(("num_tokens", "max_local"), [(161, 64), (300, 64), (97, 0)])
async def test_one_that_lacks_more_is_refused_at_once_and_leaves_nothing(num_tokens: int, max_local: int) -> None:
    async with running(World(colocated=False, max_local=max_local)) as w:
        await conversation(w)
        await w.idle()
        with pytest.raises(Overloaded, match=r"decode\.max_local_prefill_tokens") as refused:
            w.submit("a", PROMPT[:num_tokens])
        assert refused.value.retry_after_s > 0
        assert w.worker.load().num_running == 0
        assert SequenceKey("a") not in w.outbox
        await w.idle()


async def test_what_was_evicted_meanwhile_is_no_longer_here() -> None:
    async with running(World(colocated=False, max_local=64)) as w:
        await conversation(w)
        w.pool.drop_cached()
        with pytest.raises(Overloaded, match="160 of the prompt's 160 tokens are not held here"):
            w.submit("a", PROMPT[:160])
        await w.idle()


async def test_one_that_is_to_be_computed_here_waits_for_nobody_and_goes_before_nobody() -> None:
    """No seat, no room, somebody who waits: prefill has it."""
    async with running(World(colocated=False, max_local=64, max_num_seqs=2)) as w:
        await conversation(w)
        await w.idle()
        w.runner.gate.clear()
        for name in ("one", "two"):
            await w.worker.lease(ask(name, 1))
        with pytest.raises(Overloaded, match="no room for a prompt of its own"):
            w.submit("a", PROMPT[:120])
        w.worker.cancel(SequenceKey("two"))
        await until(lambda: w.reservations.num_granted == 1)
        waiter = asyncio.create_task(w.worker.lease(ask("big", 20)))
        await until(lambda: w.worker.load().num_waiting == 1, what="a hand-over waits for room")
        with pytest.raises(Overloaded, match="no room for a prompt of its own"):
            w.submit("a", PROMPT[:120])
        waiter.cancel()
        await asyncio.wait({waiter})
        used = w.pool.allocate(w.pool.num_free)
        with pytest.raises(Overloaded, match="no room for a prompt of its own"):
            w.submit("a", PROMPT[:150])
        assert w.found(PROMPT[:100]) == 6
        w.pool.free(used)
        w.worker.cancel(SequenceKey("one"))
        w.runner.gate.set()
        await w.idle()


async def test_its_hits_are_kept_from_when_it_is_taken() -> None:
    """A hand-over that comes before its first pass finds room elsewhere."""
    async with running(World(colocated=False, max_local=64)) as w:
        await conversation(w)
        await w.idle()
        w.submit("a", PROMPT[:110], max_tokens=2)  # 6 hits and a block; 13 blocks are left
        grant = await w.worker.lease(ask("b", 13))
        assert w.found(PROMPT[:96]) == 6
        await w.ended("a")
        assert w.cached("a") == 96
        w.worker.cancel(SequenceKey("b"))
        assert len(grant.region.block_ids) == 13
        await w.idle()


async def test_a_step_goes_beside_it_and_a_prompt_is_taken_in_chunks() -> None:
    async with running(World(num_blocks=40, colocated=False, max_local=64, chunk_tokens=16)) as w:
        await conversation(w)
        await w.hand_over("steady", max_tokens=40)
        await until(lambda: len(w.tokens("steady")) > 3)
        w.submit("a", PROMPT[:150])
        await w.ended("a", "steady")
        assert w.tokens("a") == [100 + i for i in range(8)]
        assert w.tokens("steady") == [100 + i for i in range(40)]
        await w.idle()


async def test_while_it_drains_nothing_new_is_computed_here() -> None:
    async with running(World(colocated=False, max_local=64)) as w:
        w.worker.status = "draining"
        with pytest.raises(Draining):
            w.submit("a", PROMPT[:10])


# ------------------------------------------------------------ colocated


async def test_a_colocated_worker_computes_no_prefix_twice() -> None:
    async with running(World()) as w:
        w.submit("a", PROMPT[:100])
        await w.ended("a")
        assert (w.cached("a"), w.runner.num_passes) == (0, 4 + 7)
        w.submit("b", PROMPT[:100])
        await w.ended("b")
        assert (w.cached("b"), w.runner.num_passes) == (96, 11 + 8), "the last token is always computed"
        w.submit("c", PROMPT[:96])
        await w.ended("c")
        assert w.cached("c") == 80, "a hit is never the block that holds the last token"
        assert w.tokens("a") == w.tokens("b") == w.tokens("c")
        await w.idle()


async def test_with_logprobs_of_the_prompt_all_of_it_is_computed() -> None:
    async with running(World()) as w:
        w.submit("a", PROMPT[:100])
        await w.ended("a")
        w.submit("b", PROMPT[:100], prompt_logprobs=1)
        await w.ended("b")
        assert w.cached("b") == 0
        await w.idle()


async def test_of_two_in_the_queue_the_second_finds_what_the_first_has_computed() -> None:
    async with running(World(max_num_seqs=1)) as w:
        w.submit("a", PROMPT[:100])
        w.submit("b", PROMPT[:100])
        await w.ended("a", "b")
        assert (w.cached("a"), w.cached("b")) == (0, 96)
        await w.idle()


async def test_what_the_store_has_is_brought_before_a_prompt_is_computed() -> None:
    async with running(World()) as w:
        w.store.num_blocks = 5
        w.store.may_come.clear()
        w.submit("a", PROMPT[:100])
        await until(lambda: w.store.num_writing == 1)
        assert (w.worker.load().num_waiting, w.worker.load().num_waiting_tokens) == (1, 100)
        assert w.worker.status_of(SequenceKey("a"), 0).phase == "queued"
        w.submit("b", PROMPT[200:220])  # which the store has, too, and which waits for its own blocks alone
        w.store.may_come.set()
        await w.ended("a", "b")
        assert (w.cached("a"), w.cached("b")) == (80, 16)
        await w.idle()


@pytest.mark.parametrize("fails", [True, False])
async def test_a_fetch_that_brings_nothing_costs_only_its_time(fails: bool) -> None:
    async with running(World()) as w:
        w.store.num_blocks, w.store.brings = 5, 0
        w.store.error = DistServeError("the node died") if fails else None
        w.submit("a", PROMPT[:100])
        await w.ended("a")
        assert (w.cached("a"), w.tokens("a")) == (0, [100 + i for i in range(8)])
        await w.idle()


async def test_cancelled_while_the_store_writes_it_holds_nothing_afterwards() -> None:
    async with running(World()) as w:
        w.store.num_blocks = 5
        w.store.may_come.clear()
        w.submit("a", PROMPT[:100])
        await until(lambda: w.store.num_writing == 1)
        w.worker.cancel(SequenceKey("a"))
        await until(lambda: w.store.num_writing == 0)
        await w.idle()
        assert w.runner.num_passes == 0


async def test_one_that_waits_for_room_goes_on_when_a_fetch_that_was_given_up_has_let_go() -> None:
    """The end of a fetch takes its time: what it wrote to is fenced before it is free."""
    async with running(World(num_blocks=20)) as w:
        fenced = asyncio.Event()
        fetch = w.store.fetch

        async def fetch_and_fence(*args: Any, **more: Any) -> int:
            try:
                return await fetch(*args, **more)
            finally:
                await fenced.wait()

        w.store.fetch = fetch_and_fence  # type: ignore[method-assign]
        w.store.num_blocks = 16
        w.store.may_come.clear()
        w.submit("a", PROMPT[:272])
        await until(lambda: bool(w.store.fetched_to))
        w.store.num_blocks = 0
        w.submit("b", PROMPT[200:296], max_tokens=2)
        await until(lambda: len(w.scheduler.waiting) == 1)
        w.worker.cancel(SequenceKey("a"))
        await until(lambda: w.store.num_writing == 0)
        await asyncio.sleep(0)
        assert w.end("b") is None
        fenced.set()
        await w.ended("b")
        await w.idle()


async def test_a_worker_that_is_not_colocated_asks_the_store_for_nothing() -> None:
    async with running(World(colocated=False, max_local=64)) as w:
        w.store.num_blocks = 5
        await conversation(w)
        w.submit("a", PROMPT[:120])
        await w.ended("a")
        assert w.store.sought == []
        await w.idle()


async def test_hand_overs_and_own_prompts_share_what_they_compute() -> None:
    async with running(World(num_blocks=40, colocated=False, max_local=64)) as w:
        await conversation(w)
        w.submit("a", PROMPT[:160])
        await w.ended("a")
        grant = await w.worker.lease(ask_for("b", PROMPT[:170]))
        assert grant.num_hit_blocks == 10
        w.worker.cancel(SequenceKey("b"))
        await w.idle()
