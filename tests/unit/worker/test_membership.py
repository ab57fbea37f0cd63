"""A service's entry: there at once, renewed, gone when it leaves; and leaving never hangs."""

import asyncio

import pytest

from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.errors import BusError
from distserve.messages import WorkerInfo
from distserve.worker.membership import Membership
from tests.waiting import until


def info() -> WorkerInfo:
    return WorkerInfo(worker_id="w", role="decode", status="ok")


async def test_it_is_there_at_once_renewed_and_gone_when_it_leaves() -> None:
    hub = MemoryHub()
    async with MemoryBus(hub) as bus, MemoryBus(hub) as other, other.registry().watch() as watch:
        async with Membership(bus.registry(), info, beat_s=0.01):
            await watch.wait_for(lambda seen: "w" in seen, 5)
            await watch.wait_for(lambda seen: seen["w"].beat >= 3, 5)
        await watch.wait_for(lambda seen: "w" not in seen, 5)


async def test_a_beat_that_fails_is_not_the_last() -> None:
    bus = MemoryBus(MemoryHub())
    registry, put = bus.registry(), bus.registry().put
    failures: list[Exception] = [BusError("cut off"), RuntimeError("anything"), TimeoutError()]
    renewed = 0

    async def flaky(entry: WorkerInfo) -> None:
        nonlocal renewed
        if entry.beat and failures:
            raise failures.pop()
        renewed = entry.beat
        await put(entry)

    registry.put = flaky  # type: ignore[method-assign]
    async with Membership(registry, info, beat_s=0.01):
        await until(lambda: renewed > 3)
    assert not failures


@pytest.mark.parametrize("turns", range(12))
async def test_leaving_in_the_very_moment_of_a_beat_does_not_hang(turns: int) -> None:
    """The cancel may come at any turn of the loop while the put ends."""
    bus = MemoryBus(MemoryHub())
    registry = bus.registry()
    putting, may_end = asyncio.Event(), asyncio.Event()

    async def slow(entry: WorkerInfo) -> None:
        if entry.beat:
            putting.set()
            await may_end.wait()

    registry.put = slow  # type: ignore[method-assign]
    membership = Membership(registry, info, beat_s=0.001)
    await membership.__aenter__()
    await asyncio.wait_for(putting.wait(), 5)
    may_end.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    leaving = asyncio.create_task(membership.__aexit__(None, None, None))
    done, _ = await asyncio.wait({leaving}, timeout=5)
    assert done, "it left"
