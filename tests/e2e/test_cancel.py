"""A request that is ended before its time leaves nothing behind, at whatever stage and in whatever way: on no worker,
store node or gateway. What comes after it is answered as if it had never been."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import pytest

from distserve.api_keys import hashed
from tests.cluster import Cluster
from tests.e2e.asking import Ask, Door, Way, World
from tests.e2e.stages import (
    LONG,
    decoded,
    fetching,
    frozen,
    handed_over,
    leased_not_yet,
    prefilled,
    prompt,
    queued,
    reached,
)
from tests.reference import Reference
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

KEY = "ds-key-of-the-tests"
MAX_CONCURRENT = 40  # of that key
NUM_CANCELS = 500
AT_ONCE = 16
SEED = 20

DEADLINE_S = 2.5  # long enough for a stage to be reached
SETTINGS = {
    "model.dtype": "float32",
    "model.compiled": "off",  # slower
    "kv.block_size": 8,
    "bus.ttl_s": 20,  # what is frozen is not given up
    "kvstore.lookup_timeout_s": 8,
    "gateway.silence_s": 5,
}
PREFILL = {"prefill.chunk_tokens": 8, "prefill.max_batch_tokens": 8, "kv.num_blocks": 700}
DECODE = {"kv.num_blocks": 260}  # hardly more than the longest sequence


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cancel")
    keys = folder / "keys.yaml"
    keys.write_text(f"- name: tests\n  sha256: '{hashed(KEY)}'\n  max_concurrent: {MAX_CONCURRENT}\n")
    settings = SETTINGS | {"gateway.keys_file": keys}
    with Cluster(tiny_llama, folder, prefill=[PREFILL], decode=[DECODE], kvstore=[{}], settings=settings) as c:
        yield c


@pytest.fixture
async def world(cluster: Cluster) -> AsyncIterator[World]:
    async with World.of(cluster, KEY) as world:
        yield world
        await world.nothing_held()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{SEED} {request.node.name}")


Stage = Callable[[World, random.Random, float | None], AbstractAsyncContextManager[Ask]]
WAYS: dict[Stage, tuple[Way, ...]] = {
    queued: ("leave", "delete", "word", "deadline"),
    fetching: ("leave", "delete", "word", "deadline"),
    prefilled: ("leave", "delete", "word"),
    leased_not_yet: ("leave", "delete", "word", "deadline"),
    handed_over: ("leave", "delete", "word", "deadline"),
    decoded: ("leave", "delete", "word", "deadline"),
}


@pytest.mark.parametrize(
    ("stage", "way"),
    [pytest.param(stage, way, id=f"{stage.__name__}-{way}") for stage, ways in WAYS.items() for way in ways],
)
async def test_one_that_is_ended_in_a_stage_leaves_nothing(
    world: World, rng: random.Random, stage: Stage, way: Way
) -> None:
    async with stage(world, rng, DEADLINE_S if way == "deadline" else None) as ask:
        assert await world.stop(ask, way), f"it was complete before: {ask.status} {ask.message}"
        assert ask.error == {"leave": "", "deadline": "deadline_exceeded"}.get(way, "cancelled")
        assert not ask.complete
        await world.forgotten(ask)  # by the gateway, whatever state the others are in
    await world.nothing_held()


# ---------------------------------------------------------------- with a second gateway, and at its fallback server


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> str:
    """The URL of a gateway that finds every first token late, and whose fallback server is the first gateway."""
    first = cluster.url
    breaker = {"mode": "on", "ttft_p99_ms": 1, "for_s": 1, "open_s": 3600, "fallback_url": first, "fallback_key": KEY}
    cluster.start_gateway("gateway-1", {f"breaker.{name}": value for name, value in breaker.items()})
    url, cluster.url = cluster.url, first
    return url


@pytest.mark.parametrize("way", ["leave", "delete", "word", "deadline"])
async def test_one_that_is_ended_at_the_fallback_server_leaves_nothing(
    world: World, rng: random.Random, second: str, way: Way
) -> None:
    world.urls.append(second)
    async with asyncio.timeout(20.0):
        while not (await world.gauges(second))["distserve_gateway_breaker_state"]:
            await world.ask(prompt(rng, 20), 1, "whole", url=second).ended()
    ask = world.ask(prompt(rng, 40), LONG, deadline_s=DEADLINE_S if way == "deadline" else None, url=second)

    async def there() -> bool:
        run = (await world.running(second)).get(ask.name)
        return ask.num_chunks >= 3 and run is not None and run["id"] in await world.running()

    await reached(ask, "at the fallback server", there)
    with frozen(world, "decode-0") if way == "deadline" else nullcontext():
        assert await world.stop(ask, way, second)
    assert ask.error == {"leave": "", "deadline": "deadline_exceeded"}.get(way, "cancelled")
    await world.nothing_held()


async def test_any_gateway_ends_what_runs_at_another(world: World, rng: random.Random, second: str) -> None:
    ask = world.ask(prompt(rng, 40), LONG)
    await reached(ask, "decoded", lambda: world.phase(ask, "decode"))
    assert await world.stop(ask, "delete", second)
    assert ask.error == "cancelled"


# ---------------------------------------------------------------- in any stage, hundreds of them


async def test_hundreds_that_are_ended_anywhere_leave_nothing(world: World, reference: Reference) -> None:
    rng = random.Random(SEED)
    prompts = [prompt(rng, num) for num in (20, 30, 60, 100, 150, 300, 500, 800, 1100, 1400, 1700, LONG)]
    known = prompts[3]
    before = world.ask(known, 24, "whole")
    await before.ended()
    assert before.token_ids == (expected := reference.greedy(known, 24)), reference.explain(
        known, expected, before.token_ids
    )
    ended, stages = Counter[str](), Counter[str]()
    turns = iter(range(NUM_CANCELS))

    async def some() -> None:
        for i in turns:
            own = random.Random(f"{SEED} {i}")
            door: Door = own.choice(("stream", "whole", "nats"))
            way: Way = own.choice(("leave", "delete", "word", "deadline")[door == "nats" :])
            after_s = own.choice((0.0, own.uniform(0, 0.05), own.uniform(0, 0.4), own.uniform(0, 1.5)))
            asked = own.choice(prompts)
            ask = world.ask(asked, LONG + 100 - len(asked), door, after_s if way == "deadline" else None)
            if way != "deadline":
                await asyncio.wait({ask.task}, timeout=after_s)
                stages[await world.stage(ask)] += 1
            early = await world.stop(ask, way)
            right = {"leave": "", "deadline": "deadline_exceeded"}.get(way, "cancelled") if early else ""
            assert ask.error == right, f"{door} {way} after {after_s:.3f} s: {ask.status} {ask.error} {ask.message}"
            ended[way if early else "complete"] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(some())
    took_s, last = await world.nothing_held()
    print(f"ended by {dict(ended)} in {dict(stages)}; {took_s:.3f} s after the last everything was free, {last} last")
    assert ended["complete"] < NUM_CANCELS // 10, "too few were ended early to show anything"

    after = world.ask(known, 24, "whole")
    await after.ended()
    assert after.token_ids == expected
    await world.nothing_held()
    await all_permits_are_free(world)


async def all_permits_are_free(world: World) -> None:
    """The key may have exactly as many requests under way as it says."""
    asks = [world.ask([5 + i] * 20, LONG) for i in range(MAX_CONCURRENT)]
    await until(lambda: all(ask.status for ask in asks), 20.0, "all are taken, or not")
    assert [ask.status for ask in asks] == [200] * MAX_CONCURRENT
    one_more = world.ask([5], 1)
    await one_more.ended()
    assert one_more.error == "rate_limited"
    for ask in asks:
        await ask.leave()
