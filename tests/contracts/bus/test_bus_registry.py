"""The registry's contract: who is there, who left, who died, and what a cut means."""

import asyncio
import time

import pytest

from distserve.bus.base import Bus, RegistryEvent, Watch
from distserve.errors import BusError, BusTimeout
from distserve.messages import Load, Role, WorkerInfo
from tests.contracts.bus.conftest import TTL_S, Fabric
from tests.waiting import until


def info(worker_id: str, role: Role = "prefill", beat: int = 0) -> WorkerInfo:
    return WorkerInfo(worker_id=worker_id, role=role, beat=beat, load=Load(free_blocks=beat))


def record(watch: Watch) -> list[RegistryEvent]:
    events: list[RegistryEvent] = []
    watch.on_event(events.append)
    return events


class Heart:
    """Beats for workers, as their processes would, until stopped."""

    def __init__(self, bus: Bus, *worker_ids: str, every_s: float = TTL_S / 4) -> None:
        self._bus = bus
        self._worker_ids = worker_ids
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    async def _beat(self) -> None:
        beat = 0
        while True:
            beat += 1
            for worker_id in self._worker_ids:
                try:
                    await self._bus.registry().put(info(worker_id, beat=beat))
                except BusError:
                    continue  # cut off: the next beat tries again
            await asyncio.sleep(self._every_s)

    async def __aenter__(self) -> "Heart":
        for worker_id in self._worker_ids:
            await self._bus.registry().put(info(worker_id))
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])


async def test_the_snapshot_is_complete_once_the_watch_has_entered(fabric: Fabric) -> None:
    here, there = await fabric.bus(), await fabric.bus()
    await there.registry().put(info("p1"))
    await there.registry().put(info("d1", role="decode"))
    async with here.registry().watch() as watch:
        assert dict(watch.snapshot) == {"p1": info("p1"), "d1": info("d1", role="decode")}


async def test_a_watch_on_an_empty_registry_starts_empty(fabric: Fabric) -> None:
    async with (await fabric.bus()).registry().watch() as watch:
        assert dict(watch.snapshot) == {}


async def test_puts_come_as_events_after_the_snapshot_changed(fabric: Fabric) -> None:
    here, there = await fabric.bus(), await fabric.bus()
    seen: list[tuple[str, int]] = []
    async with here.registry().watch() as watch:
        events = record(watch)
        watch.on_event(lambda event: seen.append((event.worker_id, watch.snapshot[event.worker_id].beat)))
        before = watch.snapshot
        await there.registry().put(info("p1", beat=1))
        await there.registry().put(info("p1", beat=2))
        await watch.wait_for(lambda s: "p1" in s and s["p1"].beat == 2, timeout_s=5)
    assert [(e.kind, e.worker_id, e.reason) for e in events] == [("put", "p1", "beat")] * 2
    assert [e.info for e in events] == [info("p1", beat=1), info("p1", beat=2)]
    assert seen == [("p1", 1), ("p1", 2)]
    assert dict(before) == {}  # a snapshot that was taken stays as it was


async def test_who_leaves_on_purpose_is_gone_at_once(fabric: Fabric) -> None:
    here, there = await fabric.bus(), await fabric.bus()
    await there.registry().put(info("p1"))
    async with here.registry().watch() as watch:
        events = record(watch)
        began = time.monotonic()
        await there.registry().delete(info("p1"))
        await watch.wait_for(lambda s: "p1" not in s, timeout_s=5)
        assert time.monotonic() - began < TTL_S / 2
        assert events == [RegistryEvent("gone", "p1", None, "left")]
    async with here.registry().watch() as later:
        assert dict(later.snapshot) == {}


async def test_who_dies_expires_and_who_beats_does_not(fabric: Fabric) -> None:
    here, there = await fabric.bus(), await fabric.bus()
    async with here.registry().watch() as watch, Heart(there, "alive"):
        await there.registry().put(info("dead"))
        began = time.monotonic()
        await watch.wait_for(lambda s: set(s) == {"alive", "dead"}, timeout_s=5)
        events = record(watch)
        await watch.wait_for(lambda s: "dead" not in s, timeout_s=10 * TTL_S)
        took = time.monotonic() - began
        assert took >= 0.9 * TTL_S
        assert [e for e in events if e.kind == "gone"] == [RegistryEvent("gone", "dead", None, "expired")]
        assert set(watch.snapshot) == {"alive"}


async def test_everybody_who_died_is_noticed(fabric: Fabric) -> None:
    here, there = await fabric.bus(), await fabric.bus()
    async with here.registry().watch() as watch:
        async with Heart(there, *(f"w{i}" for i in range(40))):
            await watch.wait_for(lambda s: len(s) == 40, timeout_s=10)
        events = record(watch)
        await watch.wait_for(lambda s: not s, timeout_s=10 * TTL_S)
    gone = [e for e in events if e.kind == "gone"]
    assert sorted(e.worker_id for e in gone) == sorted(f"w{i}" for i in range(40))
    assert {e.reason for e in gone} == {"expired"}


async def test_hundreds_of_workers_are_listed_whole(fabric: Fabric) -> None:
    here, there = await fabric.bus(), await fabric.bus()
    fabric_ids = {f"w{i}" for i in range(600)}
    async with here.registry().watch() as early:
        await asyncio.gather(*(there.registry().put(info(worker_id)) for worker_id in fabric_ids))
        async with here.registry().watch() as late:
            assert set(late.snapshot) == fabric_ids
        await early.wait_for(lambda s: set(s) == fabric_ids, timeout_s=10)


async def test_wait_for_says_when_it_waited_in_vain(fabric: Fabric) -> None:
    async with (await fabric.bus()).registry().watch() as watch:
        with pytest.raises(BusTimeout, match=r"0\.1 s"):
            await watch.wait_for(lambda s: "nobody" in s, timeout_s=0.1)


async def test_a_failing_callback_does_not_hurt_the_watch(fabric: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    bus = await fabric.bus()

    def fail(event: RegistryEvent) -> None:
        raise ValueError("spoilt")

    async with bus.registry().watch() as watch:
        watch.on_event(fail)
        events = record(watch)
        await bus.registry().put(info("p1"))
        await watch.wait_for(lambda s: "p1" in s, timeout_s=5)
        await until(lambda: len(events) == 1)
    assert "spoilt" in caplog.text


async def test_an_id_that_is_no_subject_token_is_refused(fabric: Fabric) -> None:
    bus = await fabric.bus()
    with pytest.raises(BusError, match=r"worker_id is 'a\.b'"):
        await bus.registry().put(info("a.b"))


async def test_a_cut_and_an_emptied_registry_cost_no_live_entry(fabric: Fabric) -> None:
    """The server dies and comes back with nothing in it. The snapshot stays all along; nobody expires falsely;
    beats fill the registry again, also for those who look anew; who died meanwhile goes a TTL after the return."""
    here, there = await fabric.bus("watcher"), await fabric.bus("workers")
    sizes: set[int] = set()
    async with here.registry().watch() as watch, Heart(there, "p1", "p2"):
        await there.registry().put(info("dies"))
        await watch.wait_for(lambda s: len(s) == 3, timeout_s=5)
        events = record(watch)
        watch.on_event(lambda event: sizes.add(len(watch.snapshot)))
        await fabric.go_down()
        await until(lambda: not here.connected)
        await asyncio.sleep(2 * TTL_S)  # the cut itself: longer than a TTL
        assert set(watch.snapshot) == {"p1", "p2", "dies"}
        assert not [e for e in events if e.kind == "gone"]
        await fabric.come_back()
        back = time.monotonic()
        await watch.wait_for(lambda s: "dies" not in s, timeout_s=20 * TTL_S)
        assert time.monotonic() - back >= 0.9 * TTL_S
        assert [e for e in events if e.kind == "gone"] == [RegistryEvent("gone", "dies", None, "expired")]
        async with here.registry().watch() as anew:
            assert set(anew.snapshot) == {"p1", "p2"}
        beat = watch.snapshot["p1"].beat
        await watch.wait_for(lambda s: s["p1"].beat > beat, timeout_s=5)
        newcomer = await fabric.bus("newcomer")
        await newcomer.registry().put(info("p3"))
        await watch.wait_for(lambda s: "p3" in s, timeout_s=5)
    assert min(sizes) >= 2


async def test_a_worker_that_is_cut_off_alone_expires_and_returns(fabric: Fabric) -> None:
    here, there = await fabric.bus(), await fabric.bus()
    async with here.registry().watch() as watch:
        async with Heart(there, "p1"):
            await watch.wait_for(lambda s: "p1" in s, timeout_s=5)
        await watch.wait_for(lambda s: not s, timeout_s=10 * TTL_S)
        async with Heart(there, "p1"):
            await watch.wait_for(lambda s: "p1" in s, timeout_s=5)


async def test_leaving_a_watch_stops_its_events(fabric: Fabric) -> None:
    bus = await fabric.bus()
    async with bus.registry().watch() as watch:
        events = record(watch)
    async with bus.registry().watch() as other:
        await bus.registry().put(info("p1"))
        await other.wait_for(lambda s: "p1" in s, timeout_s=5)
    assert events == []
