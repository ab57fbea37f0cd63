"""The stages of a request, each of one that stays in it for long enough to be seen there: in a cluster of one prefill
worker, one decode worker with a small pool, and a store node."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.e2e.asking import Ask, World

LONG, HALF = 1900, 1000  # tokens: of prompts whose prefill takes a while; of one that fills half of decode's pool


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(3, 380) for _ in range(num_tokens)]


async def reached(ask: Ask, stage: str, there: Callable[[], Awaitable[object]]) -> None:
    """Until `there()` is true; the request must not have ended before."""
    async with asyncio.timeout(20.0):
        while not await there():
            assert not ask.task.done(), f"it ended before it was {stage}: {ask.status} {ask.message}"
            await asyncio.sleep(0.002)


@asynccontextmanager
async def queued(world: World, rng: random.Random, deadline_s: float | None) -> AsyncIterator[Ask]:
    before = [world.ask(prompt(rng, LONG), 2) for _ in range(5)]
    for ask in before:
        await reached(ask, "under way", lambda ask=ask: world.phase(ask, "prefill"))
    ask = world.ask(prompt(rng, LONG), 2, deadline_s=deadline_s)

    async def there() -> bool:
        running = (await world.of_worker("prefill-0"))["distserve_worker_running_sequences"]
        return bool(running) and await world.phase(ask, "prefill") == "queued"

    await reached(ask, "queued", there)
    yield ask
    for ask in before:
        await ask.leave()


@asynccontextmanager
async def fetching(world: World, rng: random.Random, deadline_s: float | None) -> AsyncIterator[Ask]:
    """From a node that does not answer."""
    world.cluster["kvstore-0"].freeze()
    try:
        ask = world.ask(prompt(rng, LONG), 2, deadline_s=deadline_s)

        async def there() -> bool:
            running = (await world.of_worker("prefill-0"))["distserve_worker_running_sequences"]
            return not running and await world.phase(ask, "prefill") == "queued"

        await reached(ask, "fetched for", there)  # a prompt that waits for nothing else
        yield ask
    finally:
        world.cluster["kvstore-0"].thaw()


@asynccontextmanager
async def prefilled(world: World, rng: random.Random, deadline_s: float | None) -> AsyncIterator[Ask]:
    ask = world.ask(prompt(rng, LONG), 2, deadline_s=deadline_s)

    async def there() -> bool:
        return await world.phase(ask, "prefill") == "prefill"

    await reached(ask, "prefilled", there)
    yield ask
    assert ask.num_chunks == 0


@asynccontextmanager
async def leased_not_yet(world: World, rng: random.Random, deadline_s: float | None) -> AsyncIterator[Ask]:
    first = world.ask(prompt(rng, HALF), LONG - HALF)

    async def runs() -> bool:
        return await world.phase(first, "decode") == "decode"

    await reached(first, "decoded", runs)
    ask = world.ask(prompt(rng, LONG), 2, deadline_s=deadline_s)

    async def there() -> bool:
        waiting = (await world.of_worker("decode-0"))["distserve_worker_waiting_sequences"]
        return waiting == 1 and await world.phase(ask, "decode") == "handoff"

    await reached(ask, "waiting for a lease", there)
    yield ask
    assert await world.phase(first, "decode") == "decode", "there was no room in all this time"
    await first.leave()


@asynccontextmanager
async def handed_over(world: World, rng: random.Random, deadline_s: float | None) -> AsyncIterator[Ask]:
    """To a decode worker that takes nothing more."""
    ask = world.ask(prompt(rng, LONG // 2), 100, deadline_s=deadline_s)

    async def granted() -> bool:
        return await world.phase(ask, "decode") == "handoff" and await world.phase(ask, "prefill") == "prefill"

    await reached(ask, "given a lease", granted)
    world.cluster["decode-0"].freeze()
    try:

        async def there() -> bool:
            return await world.phase(ask, "prefill") == "handoff"

        await reached(ask, "handed over", there)
        yield ask
    finally:
        world.cluster["decode-0"].thaw()


@asynccontextmanager
async def decoded(world: World, rng: random.Random, deadline_s: float | None) -> AsyncIterator[Ask]:
    ask = world.ask(prompt(rng, 40), LONG, deadline_s=deadline_s)

    async def there() -> bool:
        return ask.num_chunks >= 5 and await world.phase(ask, "decode") == "decode"

    await reached(ask, "decoded", there)
    yield ask
