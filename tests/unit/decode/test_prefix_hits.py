"""What a decode worker's pool keeps of its sequences: found by the next hand-over, refused if it is not what it seems,
named only once it is computed, and given to the store."""

import random
from collections.abc import AsyncIterator, Callable

import pytest

from distserve.bus.base import RegistryEvent
from distserve.errors import DistServeError, KVError
from distserve.kv.hashing import tenant_of
from distserve.messages import SequenceKey
from distserve.worker.store.offers import Label
from tests.unit.decode.decode_world import World, ask_for, names_of, running
from tests.waiting import until

PROMPT = random.Random(3).choices(range(1000), k=200)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(World(colocated=False)) as w:
        yield w


def answer(num: int) -> list[int]:
    """What the engine says, as far as its KV is needed for that."""
    return [100 + i for i in range(num - 1)]


async def test_the_next_turn_finds_the_prompt_and_the_answer(world: World) -> None:
    await world.hand_over_prompt("a", PROMPT[:40], max_tokens=30)
    await world.ended("a")
    said = PROMPT[:40] + answer(30)
    assert world.found(said) == len(said) // 16 == 4
    turn = [*said, 129, *PROMPT[100:130]]
    grant = await world.hand_over_prompt("b", turn)
    assert grant.num_hit_blocks == 4
    await world.ended("b")
    assert world.tokens("b") == [100 + i for i in range(8)]
    await world.idle()


async def test_hits_come_before_the_leases_blocks_in_the_table(world: World) -> None:
    await world.hand_over_prompt("a", PROMPT[:64], max_tokens=2)
    await world.ended("a")
    held = world.pool.find(names_of(PROMPT[:64]))
    world.runner.gate.clear()
    grant = await world.hand_over_prompt("b", PROMPT[:70])
    await until(world.runner.in_pass.is_set)
    (sequence,) = world.scheduler.running
    assert sequence.block_table == [*held, *grant.region.block_ids]
    world.runner.gate.set()
    await world.ended("b")
    await world.idle()


async def test_a_prompts_verified_blocks_are_named_when_they_are_adopted(world: World) -> None:
    world.runner.gate.clear()
    await world.hand_over_prompt("a", PROMPT[:63])  # token 0 fills the fourth block, and has no KV yet
    assert world.found([*PROMPT[:63], 100]) == 3
    await until(world.runner.in_pass.is_set)
    assert world.found([*PROMPT[:63], 100]) == 3
    world.runner.gate.set()
    await until(lambda: world.found([*PROMPT[:63], 100]) == 4, what="it is named after the pass that computes it")
    await world.ended("a")
    await world.idle()


async def test_only_what_is_computed_is_named_whatever_ends_it(world: World) -> None:
    """The last token of an answer has no KV, and neither has a pass that failed left any. Where no numbers came out,
    what went in may be wrong."""
    await world.hand_over_prompt("a", PROMPT[:20], max_tokens=13)  # 32 tokens with the KV of 31, and one drawn
    await world.ended("a")
    assert world.found(PROMPT[:20] + answer(13)) == 2
    await world.hand_over_prompt("b", PROMPT[50:70], max_tokens=12)
    await world.ended("b")
    assert world.found([*PROMPT[50:70], *answer(13)]) == 1
    world.runner.fail = RuntimeError("boom")
    await world.hand_over_prompt("c", PROMPT[100:131])
    await world.ended("c")
    assert world.found([*PROMPT[100:131], 100]) == 1
    world.runner.fail = None
    await world.hand_over_prompt("nan", PROMPT[140:171])
    await world.ended("nan")
    assert world.found([*PROMPT[140:171], 100]) == 0
    await world.idle()


async def test_what_comes_from_a_side_that_knows_no_salts_is_not_shared(world: World) -> None:
    """It may be a salted request whose salt such a prefill worker did not pass on."""
    await world.hand_over_prompt("a", PROMPT[:70], cache_salt=None)
    await world.ended("a")
    assert world.found(PROMPT[:70]) == 0
    await world.idle()


async def test_only_equal_salts_share(world: World) -> None:
    await world.hand_over_prompt("a", PROMPT[:70], salt="one")
    await world.ended("a")
    assert (await world.hand_over_prompt("b", PROMPT[:70], salt="two")).num_hit_blocks == 0
    assert (await world.hand_over_prompt("c", PROMPT[:70])).num_hit_blocks == 0
    assert (await world.hand_over_prompt("d", PROMPT[:70], salt="one")).num_hit_blocks == 4
    await world.ended("b", "c", "d")
    await world.idle()


@pytest.mark.parametrize("differs", ["its tokens", "its salt"])
async def test_a_state_that_is_not_what_its_hits_hold_is_refused_and_nothing_is_freed_twice(
    world: World, differs: str
) -> None:
    await world.hand_over_prompt("a", PROMPT[:70])
    await world.ended("a")
    await until(lambda: world.pool.num_used == 0)
    grant = await world.worker.lease(ask_for("b", PROMPT[:70]))
    assert grant.num_hit_blocks == 4
    tokens = [*PROMPT[:20], 7, *PROMPT[21:70], 100] if differs == "its tokens" else [*PROMPT[:70], 100]
    with pytest.raises(KVError, match=f"hash {int(differs == 'its tokens')} is not that of its tokens"):
        world.commit("b", grant, 70, token_ids=tokens, cache_salt="other" if differs == "its salt" else "")
    world.worker.on_lost(grant.region.lease_id, grant.region.epoch, KVError("refused"))  # a receiver says so, too
    assert (world.pool.num_used, world.worker.load().num_running) == (0, 0)
    assert world.found(PROMPT[:70]) == 4
    assert (await world.hand_over_prompt("b", PROMPT[:70])).num_hit_blocks == 4, "and a retry works"
    await world.ended("b")
    await world.idle()


def cancelled(world: World) -> None:
    world.worker.cancel(SequenceKey("b"))


def gone(world: World) -> None:
    world.worker.on_registry(RegistryEvent("gone", "g", None, "expired"))


def failing(world: World) -> None:
    world.runner.fail = RuntimeError("boom")


def nothing(world: World) -> None:
    """It ends by itself."""


@pytest.mark.parametrize("happens", [cancelled, gone, failing, nothing])
async def test_however_a_sequence_ends_its_hits_are_still_there_and_nobodys(
    world: World, happens: Callable[[World], None]
) -> None:
    await world.hand_over_prompt("a", PROMPT[:70])
    await world.ended("a")
    world.runner.gate.clear()
    await world.hand_over_prompt("b", PROMPT[:70])
    await until(world.runner.in_pass.is_set)
    happens(world)
    world.runner.gate.set()
    await world.idle()
    assert world.found(PROMPT[:70]) == 4


async def test_a_lease_that_is_given_up_leaves_the_hits(world: World) -> None:
    await world.hand_over_prompt("a", PROMPT[:70])
    await world.ended("a")
    await world.worker.lease(ask_for("b", PROMPT[:70]))
    world.worker.cancel(SequenceKey("b"))
    await world.idle()
    assert world.found(PROMPT[:70]) == 4


async def test_without_the_cache_nothing_is_found_named_or_offered() -> None:
    async with running(World(colocated=False, keep=False)) as w:
        for name in ("a", "b"):
            assert (await w.hand_over_prompt(name, PROMPT[:70], max_tokens=40)).num_hit_blocks == 0
            await w.ended(name)
        await w.idle()
        assert w.pool.num_free == w.pool.num_total
        assert w.store.offers == []


async def test_of_a_finished_sequence_what_was_generated_is_offered_with_whose_it_is(world: World) -> None:
    await world.hand_over_prompt("a", PROMPT[:40], salt="s", max_tokens=30, conversation="talk")
    await world.ended("a")
    (offered,) = world.store.offers
    said = PROMPT[:40] + answer(30)
    assert offered.hashes == names_of(said, "s")[2:4], "prefill offers the prompt's full blocks"
    assert offered.block_ids == world.pool.find(names_of(said, "s"))[2:4]
    assert offered.label == Label(tenant_of("s"), "talk", "normal")
    await world.idle()


async def test_a_stop_string_found_at_the_gateway_loses_nothing_of_the_answer(world: World) -> None:
    """It ends the sequence by a cancel."""
    await world.hand_over_prompt("a", PROMPT[:40], max_tokens=200)
    await until(lambda: len(world.tokens("a")) >= 30)
    world.worker.cancel(SequenceKey("a"))
    await world.idle()
    assert len(world.store.offers) == 1
    assert len(world.store.offers[0].hashes) >= 2


async def test_an_answer_that_fills_no_block_is_not_offered(world: World) -> None:
    await world.hand_over_prompt("a", PROMPT[:40], max_tokens=8)
    await world.ended("a")
    assert world.store.offers == []
    await world.idle()


async def test_what_is_cached_counts_as_free(world: World) -> None:
    await world.hand_over_prompt("a", PROMPT[:70])
    await world.ended("a")
    await world.idle()
    assert world.pool.num_cached == 4
    assert world.worker.load().free_blocks == world.pool.num_total


async def test_draining_waits_for_the_store(world: World) -> None:
    await world.worker.drain(0.5)
    assert len(world.store.drained) == 1


async def test_a_sequence_that_is_here_twice_is_refused_with_its_hits_given_back(world: World) -> None:
    await world.hand_over_prompt("a", PROMPT[:70], max_tokens=2)
    await world.ended("a")
    one = await world.worker.lease(ask_for("b", PROMPT[:70]))
    two = await world.worker.lease(ask_for("b", PROMPT[:70]))
    world.runner.gate.clear()
    world.commit("b", one, 70, token_ids=[*PROMPT[:70], 100])
    with pytest.raises(DistServeError, match="running here already"):
        world.commit("b", two, 70, token_ids=[*PROMPT[:70], 100])
    world.runner.gate.set()
    await world.ended("b")
    await world.idle()
    assert world.found(PROMPT[:70]) == 4
