"""What a worker gives to the store when its pool is full, where that is faster than to compute it again, and what comes
of it."""

import random
from collections.abc import AsyncIterator

import pytest

from distserve.kv.block_pool import BlockPool
from distserve.messages import SequenceKey
from distserve_decode.offer_speed import OfferSpeed
from tests.unit.decode.decode_world import World, names_of, running
from tests.unit.decode.store_side import ScriptedStore
from tests.waiting import until

PROMPT = random.Random(5).choices(range(1000), k=300)
FAST, SLOW = 1e12, 1e-3  # bytes a second


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(World(num_blocks=20, block_bytes=1024)) as w:
        yield w


NUM_OUT = 270  # of 40 tokens, which makes 20 blocks: the whole pool


async def preempted(w: World) -> list[int]:
    """Sequence "a" has got to 18 blocks, and has lost them: two are others' until a test gives them back."""
    w.store.holds = True
    others = w.pool.allocate(2)
    await w.hand_over_prompt("a", PROMPT[:40], max_tokens=NUM_OUT)
    await until(lambda: w.scheduler.num_preemptions == 1)
    return others


async def goes_on(w: World, others: list[int]) -> None:
    w.pool.free(others)
    w.worker.on_freed()
    await w.ended("a")
    assert w.tokens("a") == [100 + i for i in range(NUM_OUT)]
    w.store.holds = False
    while w.store.held:
        w.store.let_go()
    await w.idle()


async def test_a_preempted_sequence_is_given_away_where_that_is_faster_and_brought_back(world: World) -> None:
    world.worker.offering.speed.bytes_per_s = FAST
    others = await preempted(world)
    (offered,) = world.store.offers
    said = PROMPT[:40] + [100 + i for i in range(NUM_OUT)]
    assert offered.hashes == names_of(said)[2:16], "prefill has offered the first two, the last two are needed now"
    assert world.worker.offering.num_given == 1
    assert world.pool.num_available == 4
    world.store.let_go(14 * 1024)
    assert world.pool.num_available == 18
    world.store.num_blocks = 1 << 20
    world.pool.drop_cached()  # only the store has them now
    num_passes = world.runner.num_passes
    await goes_on(world, others)
    assert len(world.store.fetched_to[0]) == 18
    assert world.runner.num_passes - num_passes == NUM_OUT - 249, "and nothing is computed again"


@pytest.mark.parametrize("bytes_per_s", [0.0, SLOW])
async def test_where_that_is_slower_or_nobody_knows_it_is_computed_again(world: World, bytes_per_s: float) -> None:
    world.worker.offering.speed.bytes_per_s = bytes_per_s
    others = await preempted(world)
    assert (world.store.offers, world.worker.offering.num_given) == ([], 0)
    await goes_on(world, others)


async def test_a_store_that_fails_costs_only_the_computing(world: World) -> None:
    world.worker.offering.speed.bytes_per_s = FAST
    others = await preempted(world)
    world.store.let_go()  # and nothing of it got there
    world.store.num_blocks, world.store.brings = 1 << 20, 0
    world.pool.drop_cached()
    await goes_on(world, others)


async def test_cancelled_while_it_is_brought_back_it_holds_nothing(world: World) -> None:
    world.worker.offering.speed.bytes_per_s = FAST
    others = await preempted(world)
    world.store.let_go()
    world.store.num_blocks = 1 << 20
    world.store.may_come.clear()
    world.pool.drop_cached()
    world.pool.free(others)
    world.worker.on_freed()
    await until(lambda: world.store.num_writing == 1)
    assert world.worker.status_of(SequenceKey("a"), 1 << 20).phase == "queued"
    world.worker.cancel(SequenceKey("a"))
    await until(lambda: world.store.num_writing == 0)
    await world.idle()


# ------------------------------------------------------------ what is measured


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measured() -> tuple[OfferSpeed, ScriptedStore, Clock]:
    clock, store = Clock(), ScriptedStore(BlockPool(4))
    store.holds = True
    return OfferSpeed(store, clock=clock), store, clock  # type: ignore[arg-type]


def test_the_store_is_as_fast_as_offers_were() -> None:
    speed, store, clock = measured()
    assert speed.bytes_per_s == 0
    store.held.append([])
    speed.began()
    clock.now = 0.5
    store.let_go(1000)
    speed.look()
    assert speed.bytes_per_s == 2000
    clock.now = 100.0
    speed.look()
    assert speed.bytes_per_s == 2000, "where nothing is offered nothing is measured"


def test_what_the_store_did_not_want_says_nothing() -> None:
    speed, store, clock = measured()
    store.held.append([])
    speed.began()
    clock.now = 0.5
    store.let_go(0)
    speed.look()
    assert speed.bytes_per_s == 0


def test_a_store_that_hangs_is_slow() -> None:
    speed, store, clock = measured()
    speed.bytes_per_s = 1000.0
    store.held.append([])
    speed.began()
    for now in range(1, 20):
        clock.now = float(now)
        speed.look()
    assert speed.bytes_per_s < 10
