"""Whoever is given up, by its client or by its deadline, holds nothing a moment later, at whatever stage it was."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from distserve.errors import DistServeError
from distserve.messages import SequenceKey, Slo
from tests.unit.decode.decode_world import World, ask_for, running
from tests.unit.decode.test_reservations import ask
from tests.waiting import until

PROMPT = random.Random(9).choices(range(1000), k=300)
KEY = SequenceKey("a")


async def runs(w: World, deadline_s: float | None) -> None:
    w.runner.gate.clear()
    await w.hand_over("a", max_tokens=250, deadline_s=deadline_s)
    await until(w.runner.in_pass.is_set)


async def is_undrawn(w: World, deadline_s: float | None) -> None:
    """Token 0 is to be drawn here, and a pass is under way."""
    w.runner.gate.clear()
    await w.hand_over("other", max_tokens=250)
    await until(w.runner.in_pass.is_set)
    await w.hand_over("a", token_ids=[7] * 20, last_hidden=b"h" * 16, deadline_s=deadline_s)


async def is_preempted(w: World, deadline_s: float | None) -> None:
    await w.worker.lease(ask("holder", 12))
    await w.hand_over("a", num_tokens=100, max_tokens=150, deadline_s=deadline_s)
    await until(lambda: w.scheduler.num_preemptions == 1)


async def waits(w: World, deadline_s: float | None) -> None:
    await w.worker.lease(ask("holder", 20))
    w.submit("a", PROMPT[:100], may_queue=True, deadline_s=deadline_s)
    await until(lambda: len(w.scheduler.waiting) == 1)


async def is_fetched_for(w: World, deadline_s: float | None) -> None:
    w.store.num_blocks = 5
    w.store.may_come.clear()
    w.submit("a", PROMPT[:100], may_queue=True, deadline_s=deadline_s)
    await until(lambda: w.store.num_writing == 1)


STAGES = [runs, is_undrawn, is_preempted, waits, is_fetched_for]
Stage = Callable[[World, float | None], Awaitable[None]]


async def gone(w: World) -> None:
    await until(lambda: KEY not in w.worker._live, 1.0, "it is gone")
    w.runner.gate.set()
    for name in ("other", "holder"):
        w.worker.cancel(SequenceKey(name))
    await w.idle()


@pytest.mark.parametrize("stage", STAGES)
async def test_cancelled_it_is_gone(stage: Stage) -> None:
    async with running(World(colocated=False)) as w:
        await stage(w, None)
        w.worker.cancel(KEY)
        w.runner.gate.set()
        await gone(w)
        assert w.end("a") is None


@pytest.mark.parametrize("stage", STAGES)
async def test_its_deadline_ends_it_and_its_gateway_is_told(stage: Stage) -> None:
    async with running(World(colocated=False)) as w:
        await stage(w, 0.3)
        await until(lambda: w.end("a") is not None, 2.0, "it is ended")
        end = w.end("a")
        assert end is not None
        assert end.error is not None
        assert end.error[0] == "deadline_exceeded"
        w.runner.gate.set()
        await gone(w)


async def test_a_lease_that_is_waited_for_is_given_up_at_once() -> None:
    async with running(World(colocated=False)) as w:
        others = w.pool.allocate(w.pool.num_available)
        asking = asyncio.create_task(w.worker.lease(ask_for("a", PROMPT[:70])))
        await until(lambda: w.reservations.num_waiting == 1)
        w.worker.cancel(KEY)
        with pytest.raises(DistServeError):
            await asyncio.wait_for(asking, 1.0)
        assert len(w.reservations) == 0
        w.pool.free(others)
        await w.idle()


async def test_a_vip_that_waits_for_a_lease_has_it_before_those_who_wait_for_more() -> None:
    async with running(World(colocated=False)) as w:
        others = w.pool.allocate(w.pool.num_available)
        large = asyncio.create_task(w.worker.lease(ask("large", 15)))
        await until(lambda: w.reservations.num_waiting == 1)
        request = ask("vip", 2)
        fields = {f: getattr(request, f) for f in request.__struct_fields__}
        vip = asyncio.create_task(w.worker.lease(type(request)(**fields | {"slo": Slo(priority="vip")})))
        await until(lambda: w.reservations.num_waiting == 2)
        w.pool.free(others[:5])
        w.worker.on_freed()
        assert len((await asyncio.wait_for(vip, 5)).region.block_ids) == 2
        assert not large.done()
        w.pool.free(others[5:])
        w.worker.cancel(SequenceKey("vip"))
        assert len((await asyncio.wait_for(large, 5)).region.block_ids) == 15
        w.worker.cancel(SequenceKey("large"))
        await w.idle()
