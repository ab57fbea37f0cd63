"""The prefill worker's loop and blocks that are shared: what is named, offered and fetched, and what never is."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from distserve.kv.hashing import tenant_of
from distserve.messages import SamplingParams, SequenceKey
from distserve.transport.base import Span
from distserve.worker.store.offers import Label
from tests.unit.prefill.prefill_side import World, running
from tests.waiting import until

PROMPT = list(range(1000, 1100))  # six full blocks and 4 tokens; the worker takes 32 tokens of it in a pass
ONE = SamplingParams(max_tokens=1)  # ends with its first token: no hand-over


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(World()) as w:
        yield w


def submit(w: World, name: str, token_ids: list[int] = PROMPT, **more: object) -> None:
    w.submit(name, num_tokens=len(token_ids), token_ids=token_ids, **more)


async def served(w: World, name: str, token_ids: list[int] = PROMPT, **more: object) -> int:
    """Alone, to its end; the cached tokens that its gateway is told of."""
    submit(w, name, token_ids, sampling=ONE, **more)
    await until(lambda: w.chunk(name, ended=True) is not None, what=f"{name} ends")
    await w.idle()
    chunk = w.chunk(name)
    assert chunk is not None
    return chunk.num_cached_tokens


# ---------------------------------------------------------------- the own pool


async def test_gateway_and_decode_are_told_what_was_not_computed(world: World) -> None:
    assert await served(world, "a") == 0
    submit(world, "b", cache_salt="", conversation="talk")
    await until(lambda: "b" in world.handoffs)
    world.handoffs["b"].may_commit.set()
    await world.idle()
    (state,) = world.handoffs["b"].states
    assert (state.num_cached_tokens, state.num_computed_tokens, state.conversation) == (96, 100, "talk")
    chunk = world.chunk("b")
    assert chunk is not None
    assert chunk.num_cached_tokens == 96
    assert (world.prefixes.num_tokens, world.prefixes.num_cached_tokens) == (200, 96)


async def test_prefix_hits_are_handed_over_before_anything_is_computed(world: World) -> None:
    await served(world, "a")
    world.runner.gate.clear()
    submit(world, "b")
    await until(world.runner.in_pass.is_set)
    [hits] = world.handoffs["b"].spans
    assert (hits.layer_start, hits.layer_stop, hits.targets) == (0, 2, tuple(range(6)))
    world.runner.gate.set()
    world.handoffs["b"].may_commit.set()
    await world.idle()
    cells = Counter((layer, t) for s in world.handoffs["b"].spans for layer in all_of(s) for t in s.targets)
    assert cells == Counter((layer, t) for layer in range(2) for t in range(7))


def all_of(span: Span) -> range:
    return range(span.layer_start, span.layer_stop)


async def test_a_pass_that_failed_names_nothing(world: World) -> None:
    world.runner.fail = RuntimeError("boom")
    submit(world, "a")
    assert "boom" in await world.error_of("a")
    await world.idle()
    assert world.pool.num_cached == 0
    world.runner.fail = None
    assert await served(world, "b") == 0


@pytest.mark.parametrize("num_tokens", [32, len(PROMPT)])
async def test_a_prompt_that_gave_no_numbers_leaves_nothing(world: World, num_tokens: int) -> None:
    """Its earlier chunks gave none that was looked at: what is wrong with them would stay."""
    submit(world, "nan-a", PROMPT[:num_tokens])
    await world.error_of("nan-a")
    await world.idle()
    assert world.pool.num_cached == 0


async def test_what_was_computed_before_its_client_left_is_kept(world: World) -> None:
    world.runner.gate.clear()
    submit(world, "a")
    await until(world.runner.in_pass.is_set)
    world.worker.cancel(SequenceKey("a"))
    world.runner.gate.set()
    await world.idle()
    assert world.pool.num_cached == 2, "one chunk"
    assert await served(world, "b") == 32


async def test_equal_prompts_that_come_together_are_computed_once(world: World) -> None:
    world.runner.gate.clear()
    for name in ("a", "b", "c"):
        submit(world, name, sampling=ONE)
    world.runner.gate.set()
    for name in ("a", "b", "c"):
        await until(lambda name=name: world.chunk(name, ended=True) is not None)  # type: ignore[misc]
    await world.idle()
    told = {name: chunk.num_cached_tokens for name in ("a", "b", "c") if (chunk := world.chunk(name)) is not None}
    assert told == {"a": 0, "b": 96, "c": 96}


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_one_that_waited_for_anothers_blocks_goes_on_without_it(world: World, how: str) -> None:
    world.runner.gate.clear()
    submit(world, "a", sampling=ONE)
    await until(world.runner.in_pass.is_set)
    submit(world, "b", sampling=ONE)
    if how == "cancelled":
        world.worker.cancel(SequenceKey("a"))
    else:
        world.runner.fail = RuntimeError("boom")
    world.runner.gate.set()
    if how == "failed":
        await world.error_of("a")
        world.runner.fail = None
    await until(lambda: world.chunk("b", ended=True) is not None, what="b ends")
    await world.idle()


# ---------------------------------------------------------------- offers


async def test_what_is_computed_is_offered_while_it_is_and_nothing_else(world: World) -> None:
    await served(world, "a", PROMPT[:40])
    assert await served(world, "b", conversation="talk", cache_salt="") == 32
    first, second = world.store.sinks
    assert (first.first, len(first.block_ids), first.ends) == (0, 2, ["finished"])
    assert (second.first, len(second.block_ids), second.ends) == (2, 4, ["finished"])
    assert second.label == Label("", "talk", "normal")
    told = Counter((layer, t) for s in second.spans for layer in all_of(s) for t in s.targets)
    assert told == Counter((layer, t) for layer in range(2) for t in range(2, 7)), "the sink leaves out the last"


async def test_offers_bear_the_tenant_not_its_salt(world: World) -> None:
    await served(world, "a", cache_salt="secret", traffic_class="background")
    [sink] = world.store.sinks
    assert sink.label == Label(tenant_of("secret"), "", "batch")
    assert "secret" not in sink.label.tenant


@pytest.mark.parametrize("how", ["cancelled", "failed", "nan"])
async def test_an_offer_of_what_was_not_computed_is_abandoned_once(world: World, how: str) -> None:
    name = "nan-a" if how == "nan" else "a"
    world.runner.gate.clear()
    submit(world, name)
    await until(world.runner.in_pass.is_set)
    if how == "cancelled":
        world.worker.cancel(SequenceKey(name))
    elif how == "failed":
        world.runner.fail = RuntimeError("boom")
    world.runner.gate.set()
    await world.idle()
    [sink] = world.store.sinks
    assert sink.ends == ["abandoned"]


async def test_a_prompt_that_is_less_than_a_block_is_offered_to_nobody(world: World) -> None:
    await served(world, "a", PROMPT[:15])
    assert world.store.sinks == []


async def test_draining_lets_offers_end(world: World) -> None:
    await world.worker.drain(5)
    [left_s] = world.store.drained
    assert 4 < left_s <= 5


# ---------------------------------------------------------------- fetching


async def test_what_the_store_has_is_not_computed(world: World) -> None:
    world.store.num_blocks = 4
    assert await served(world, "a", holder="d1") == 64
    assert world.store.sought == [(0, 6, "d1")]
    assert world.runner.num_passes == 2  # of 32 and 4 tokens
    [sink] = world.store.sinks
    assert sink.first == 4


async def test_only_what_the_own_pool_lacks_is_sought(world: World) -> None:
    await served(world, "a", PROMPT[:40])
    world.store.num_blocks = 6
    assert await served(world, "b") == 96
    assert world.store.sought == [(2, 6, "")]
    assert len(world.store.fetched_to[0]) == 4
    assert await served(world, "c") == 96
    assert len(world.store.sought) == 1


async def test_less_than_is_worth_it_is_computed(world: World) -> None:
    world.store.num_blocks = 1
    assert await served(world, "a") == 0
    assert (world.store.num_released, world.store.fetched_to) == (1, [])
    world.store.num_blocks = 100
    assert await served(world, "b", [5] * 32) == 0, "of two blocks one is computed anyhow"
    assert len(world.store.sought) == 1


@pytest.mark.parametrize("brings", [0, 3])
async def test_what_does_not_come_is_computed(world: World, brings: int) -> None:
    world.store.num_blocks, world.store.brings = 6, brings
    assert await served(world, "a") == brings * 16


async def test_a_store_that_breaks_is_a_miss(world: World) -> None:
    world.store.num_blocks, world.store.error = 6, RuntimeError("broken")
    assert await served(world, "a") == 0


async def test_logprobs_of_the_prompt_seek_nothing(world: World) -> None:
    world.store.num_blocks = 6
    submit(world, "a", sampling=SamplingParams(max_tokens=1, prompt_logprobs=1))
    await until(lambda: world.chunk("a", ended=True) is not None)
    assert world.store.sought == []


async def test_a_store_that_is_slow_costs_no_more_than_its_time() -> None:
    async with running(World(fetch_timeout_s=0.1)) as w:
        w.store.num_blocks = 6
        w.store.may_come.clear()
        assert await served(w, "a") == 0
        assert w.store.num_writing == 0


async def test_one_that_fetches_delays_nobody_and_keeps_its_place(world: World) -> None:
    world.store.num_blocks = 6
    world.store.may_come.clear()
    submit(world, "first", sampling=ONE)
    await until(lambda: bool(world.store.fetched_to))
    assert world.worker.load().num_waiting == 1
    assert world.worker.load().num_waiting_tokens == 100
    assert phase_of(world, "first") == "queued"
    submit(world, "short", [5] * 20, sampling=ONE)  # too short to seek anything
    await until(lambda: world.chunk("short", ended=True) is not None, what="it passes the one that fetches")
    world.runner.gate.clear()
    submit(world, "running", [6] * 20, sampling=ONE)
    await until(world.runner.in_pass.is_set)
    submit(world, "later", [7] * 20, sampling=ONE)
    world.store.may_come.set()
    await until(lambda: len(world.worker._waiting) == 2 and not world.worker._waiting.num_fetched_for)
    order = [j.key.request_id for j in world.worker._scheduler.waiting]
    assert order == ["first", "later"], "by arrival"
    world.runner.gate.set()
    await until(lambda: world.chunk("first", ended=True) is not None)
    chunk = world.chunk("first")
    assert chunk is not None
    assert chunk.num_cached_tokens == 96
    await world.idle()


def phase_of(w: World, name: str) -> str:
    return w.worker.status_of(SequenceKey(name), 0).phase


@pytest.mark.parametrize("stage", ["lookup", "fetch"])
@pytest.mark.parametrize("why", ["cancelled", "deadline", "drained"])
async def test_given_up_while_it_fetches_it_leaves_nothing(world: World, stage: str, why: str) -> None:
    world.store.num_blocks = 6
    (world.store.may_answer if stage == "lookup" else world.store.may_come).clear()
    submit(world, "a", deadline_s=0.2 if why == "deadline" else None)
    await until(lambda: bool(world.store.sought if stage == "lookup" else world.store.fetched_to))
    if why == "cancelled":
        world.worker.cancel(SequenceKey("a"))
        world.worker.cancel(SequenceKey("a"))
    elif why == "drained":
        await world.worker.drain(0.01)
    await world.idle()
    assert world.store.num_writing == 0
    assert world.pool.num_cached == 0, "what may be half written has no name"
    assert phase_of(world, "a") in ("unknown", "finished")
    assert world.handoffs == {}


@pytest.mark.parametrize("num_turns", range(8))
async def test_cancelled_at_the_moment_its_blocks_come_it_is_not_taken_up(world: World, num_turns: int) -> None:
    world.store.num_blocks = 6
    world.store.may_come.clear()
    submit(world, "a")
    await until(lambda: bool(world.store.fetched_to))
    world.store.may_come.set()
    for _ in range(num_turns):  # of the loop, in which it goes from the fetch to the queue to a pass
        await asyncio.sleep(0)
    world.worker.cancel(SequenceKey("a"))
    await world.idle()
    assert all(h.aborted for h in world.handoffs.values())
    world.submit("next", sampling=ONE)
    await until(lambda: world.chunk("next", ended=True) is not None)
    await world.idle()


async def test_equal_prompts_that_come_together_are_fetched_once(world: World) -> None:
    world.store.num_blocks = 6
    world.store.may_come.clear()
    for name in ("a", "b", "c"):
        submit(world, name, sampling=ONE)
    await until(lambda: bool(world.store.fetched_to))
    world.store.may_come.set()
    for name in ("a", "b", "c"):
        await until(lambda name=name: world.chunk(name, ended=True) is not None)  # type: ignore[misc]
        chunk = world.chunk(name)
        assert chunk is not None
        assert chunk.num_cached_tokens == 96
    assert len(world.store.fetched_to) == 1
    await world.idle()


async def test_one_that_waited_for_anothers_fetch_in_vain_is_computed(world: World) -> None:
    world.store.num_blocks, world.store.brings = 6, 0
    world.store.may_come.clear()
    submit(world, "a", sampling=ONE)
    submit(world, "b", sampling=ONE)
    await until(lambda: bool(world.store.fetched_to))
    world.store.may_come.set()
    await until(lambda: world.chunk("b", ended=True) is not None)
    await world.idle()
    assert len(world.store.fetched_to) == 1


async def test_one_that_waited_for_another_whose_client_left_fetches_itself(world: World) -> None:
    world.store.num_blocks = 6
    world.store.may_come.clear()
    submit(world, "a", sampling=ONE)
    submit(world, "b", sampling=ONE)
    await until(lambda: bool(world.store.fetched_to))
    world.worker.cancel(SequenceKey("a"))
    await until(lambda: len(world.store.fetched_to) == 2)
    world.store.may_come.set()
    await until(lambda: world.chunk("b", ended=True) is not None)
    chunk = world.chunk("b")
    assert chunk is not None
    assert chunk.num_cached_tokens == 96
    await world.idle()


async def test_what_those_that_wait_will_need_is_not_taken_for_a_fetch(world: World) -> None:
    world.runner.gate.clear()
    submit(world, "running", [5] * 160, sampling=ONE)  # ten blocks of twenty
    await until(world.runner.in_pass.is_set)
    submit(world, "waiting", [6] * 160, sampling=ONE)  # the other ten
    world.store.num_blocks = 6
    submit(world, "a", sampling=ONE)
    await until(lambda: not world.worker._waiting.num_fetched_for)
    assert (world.store.sought, world.store.fetched_to) == ([], [])
    world.runner.gate.set()
    for name in ("running", "waiting", "a"):
        await until(lambda name=name: world.chunk(name, ended=True) is not None)  # type: ignore[misc]
    await world.idle()


async def test_without_the_cache_nothing_is_sought_or_offered() -> None:
    async with running(World(keep=False)) as w:
        w.store.num_blocks = 6
        assert await served(w, "a") == 0
        assert await served(w, "b") == 0
        assert (w.store.sought, w.store.sinks) == ([], [])
        assert w.pool.num_free == w.pool.num_total


async def test_fetches_and_cancellations_in_any_order_leak_nothing(world: World) -> None:
    world.store.num_blocks = 3
    for i in range(40):
        submit(world, str(i), [i % 5] * 60 + [i] * 20, sampling=ONE)
        await asyncio.sleep(0.001 * (i % 4))
        if i % 3 == 0:
            world.worker.cancel(SequenceKey(str(i)))
        await until(lambda: len(world.worker._waiting) < 3)
    await world.idle()
