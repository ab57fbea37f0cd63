"""The stages of a request, each of one that stays in it for long enough to be seen there: in a cluster of one prefill
worker, one decode worker with a small pool, and a store node."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext

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


@contextmanager
def frozen(world: World, worker: str) -> Iterator[None]:
    """It stands still, and with it what it has, until a deadline has passed for instance."""
    world.cluster[worker].freeze()
    try:
        yield
    finally:
        world.cluster[worker].thaw()


@asynccontextmanager
async def queued(world: World, rng: random.Random, deadline_s: float | None) -> AsyncIterator[Ask]:
    """Behind two that fill prefill's pool and wait for a decode worker that gives no leases."""
    with frozen(world, "decode-0"):
        before = [world.ask(prompt(rng, LONG), 2) for _ in range(2)]

        async def full() -> bool:
            return all([await world.phase(other, "prefill") in ("prefill", "handoff") for other in before])

        await reached(before[0], "computed", full)
        ask = world.ask(prompt(rng, LONG), 2, deadline_s=deadline_s)

        async def there() -> bool:
            said = await world.of_worker("prefill-0")
            counts = said["distserve_worker_running_sequences"], said["distserve_worker_waiting_sequences"]
            return counts == (2, 1) and await world.phase(ask, "prefill") == "queued"

        await reached(ask, "queued", there)
        yield ask
        for other in before:
            await other.leave()


@asynccontextmanager
async def fetching(world: World, rng: random.Random, deadline_s: float | None) -> AsyncIterator[Ask]:
    """From a node that does not answer."""
    with frozen(world, "kvstore-0"):
        ask = world.ask(prompt(rng, LONG), 2, deadline_s=deadline_s)

        async def there() -> bool:
            running = (await world.of_worker("prefill-0"))["distserve_worker_running_sequences"]
            return not running and await world.phase(ask, "prefill") == "queued"

        await reached(ask, "fetched for", there)  # a prompt that waits for nothing else
        yield ask


@asynccontextmanager
async def prefilled(world: World, rng: random.Random, deadline_s: float | None) -> AsyncIterator[Ask]:
    for _ in range(5):  # nothing holds it there: it may be over before it was seen
        ask = world.ask(prompt(rng, LONG), 2, deadline_s=deadline_s)
        phase = ""
        while phase != "prefill" and not ask.task.done():
            phase = await world.phase(ask, "prefill")
        if phase == "prefill":
            break
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
    with frozen(world, "decode-0") if deadline_s else nullcontext():
        yield ask
    assert await world.phase(first, "decode") == "decode", "there was no room in all this time"
    await first.leave()


@asynccontextmanager
async def handed_over(world: World, rng: random.Random, deadline_s: float | None) -> AsyncIterator[Ask]:
    """To a decode worker that takes nothing more."""
    ask = world.ask(prompt(rng, LONG), 100, deadline_s=deadline_s)

    async def granted() -> bool:  # at once: there is room
        return await world.phase(ask, "decode") == "handoff"

    await reached(ask, "given a lease", granted)
    with frozen(world, "decode-0"):

        async def there() -> bool:
            return await world.phase(ask, "prefill") == "handoff"

        await reached(ask, "handed over", there)
        yield ask


@asynccontextmanager
async def decoded(world: World, rng: random.Random, deadline_s: float | None) -> AsyncIterator[Ask]:
    ask = world.ask(prompt(rng, 40), LONG, deadline_s=deadline_s)

    async def there() -> bool:
        return ask.num_chunks >= 5 and await world.phase(ask, "decode") == "decode"

    await reached(ask, "decoded", there)
    with frozen(world, "decode-0") if deadline_s else nullcontext():
        yield ask
