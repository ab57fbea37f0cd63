"""The index follows what workers say over a bus: events lost, doubled, reordered; snapshots in pages; lives
that end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import msgspec
import pytest

from distserve.bus import subjects
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.messages import KVEvents, WorkerInfo, encode
from distserve_gateway import kv_follower
from distserve_gateway.kv_follower import KVFollower
from distserve_gateway.kv_index import KVIndex
from tests.unit.gateway.scripted import LAYOUT, MODEL, ScriptedWorker, says
from tests.waiting import until

NAMES = [i.to_bytes(8, "little") for i in range(1, 400)]


class Scene:
    """Workers on one hub, and a follower with a bus of its own."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.hub = MemoryHub()
        self.stack = stack
        self.index = KVIndex()
        self.bus = self.connect("gateway")

    def connect(self, name: str) -> MemoryBus:
        return MemoryBus(self.hub, name=name, registry_ttl_s=1.0)

    async def worker(
        self, worker_id: str, *, tells_blocks: bool = True, prepare: Callable[[ScriptedWorker], object] | None = None
    ) -> ScriptedWorker:
        bus = await self.stack.enter_async_context(self.connect(worker_id))
        role = "prefill" if worker_id.startswith("p") else "decode"
        made = ScriptedWorker(bus, role, worker_id, says("x"), tells_blocks=tells_blocks)
        if prepare is not None:
            prepare(made)
        await self.stack.enter_async_context(made)
        return made

    async def follow(self) -> KVFollower:
        watch = await self.stack.enter_async_context(self.bus.registry().watch())
        self.follower = KVFollower(self.bus, watch, MODEL, self.index)
        return await self.stack.enter_async_context(self.follower)

    async def agree(self, worker: ScriptedWorker) -> None:
        def agreed() -> bool:
            known = self.index.holders.get(worker.worker_id, {})
            return self.index.lacks(worker.worker_id) is None and known == worker.blocks.numbers

        await until(agreed, what=f"the index holds what {worker.worker_id} holds")
        self.index.check()


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(kv_follower, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(kv_follower, "MAX_PAUSE_S", 0.05)
    async with AsyncExitStack() as stack:
        yield Scene(stack)


async def test_a_gateway_that_starts_asks_every_worker_what_it_holds(scene: Scene) -> None:
    workers = [await scene.worker(w, prepare=lambda w: w.blocks.change(NAMES[:9])) for w in ("p0", "d0", "d1")]
    await scene.follow()
    for worker in workers:
        await scene.agree(worker)
        assert worker.blocks.asked == [0]
    assert scene.follower.num_snapshots == 3


async def test_events_are_followed_without_asking_again(scene: Scene) -> None:
    await scene.follow()
    worker = await scene.worker("d0")
    await scene.agree(worker)
    await worker.blocks.store(*NAMES[:3])
    await worker.blocks.send(worker.blocks.change(NAMES[3:5], NAMES[:1]))
    await until(lambda: len(scene.index.holders.get("d0", {})) == 4)
    await scene.agree(worker)
    assert worker.blocks.asked == [0]


async def test_doubled_and_reordered_events_end_right(scene: Scene) -> None:
    await scene.follow()
    worker = await scene.worker("d0")
    await scene.agree(worker)
    blocks = worker.blocks
    one, two, three = blocks.change(NAMES[:3]), blocks.change(NAMES[3:5], NAMES[:1]), blocks.change(removed=NAMES[1:2])
    await blocks.send(two, one, two, three, one)
    await until(lambda: bool(scene.index.holders))
    await scene.agree(worker)


async def test_a_lost_event_is_made_up_for_by_a_snapshot(scene: Scene) -> None:
    await scene.follow()
    worker = await scene.worker("d0")
    await scene.agree(worker)
    worker.blocks.change(NAMES[:50])  # lost
    await worker.blocks.store(*NAMES[50:60])
    await until(lambda: bool(scene.index.holders))
    await scene.agree(worker)
    assert worker.blocks.asked == [0, 0]


async def test_a_large_snapshot_comes_in_pages(scene: Scene) -> None:
    def large(worker: ScriptedWorker) -> None:
        worker.blocks.change(NAMES)
        worker.blocks.page_size = 100

    await scene.follow()
    worker = await scene.worker("d0", prepare=large)
    await until(lambda: bool(scene.index.holders))
    await scene.agree(worker)
    assert worker.blocks.asked == [0, 100, 200, 300]


async def test_a_snapshot_is_of_one_moment_whatever_changes_under_way(scene: Scene) -> None:
    worker: ScriptedWorker

    async def changes_once(offset: int) -> None:
        if offset == 200:
            worker.blocks.before_page = None
            await worker.blocks.send(worker.blocks.change(NAMES[300:350], NAMES[:10]))

    def large(made: ScriptedWorker) -> None:
        nonlocal worker
        worker = made
        made.blocks.change(NAMES[:300])
        made.blocks.page_size = 100
        made.blocks.before_page = changes_once

    await scene.follow()
    await scene.worker("d0", prepare=large)
    await until(lambda: bool(scene.index.holders))
    await scene.agree(worker)
    assert worker.blocks.asked == [0, 100, 200]


async def test_a_worker_that_never_stands_still_is_known_all_the_same(scene: Scene) -> None:
    """Before each page something goes, so that all behind it moves up, and something comes."""
    worker: ScriptedWorker
    coming, going = iter(NAMES[100:]), iter(NAMES)

    async def always_changes(offset: int) -> None:
        await worker.blocks.send(worker.blocks.change([next(coming)], [next(going)]))

    def large(made: ScriptedWorker) -> None:
        nonlocal worker
        worker = made
        made.blocks.change(NAMES[:100])
        made.blocks.page_size = 30
        made.blocks.before_page = always_changes

    await scene.follow()
    await scene.worker("d0", prepare=large)
    await until(lambda: bool(scene.index.holders))
    await scene.agree(worker)
    assert worker.blocks.asked == [0, 30, 60, 90]


async def test_a_moment_that_the_worker_keeps_no_more_is_begun_again(scene: Scene) -> None:
    worker: ScriptedWorker

    async def changes(offset: int) -> None:
        worker.blocks.forgets = len(worker.blocks.asked) <= 5
        if worker.blocks.forgets:
            await worker.blocks.send(worker.blocks.change(NAMES[200 + len(worker.blocks.asked) :][:1]))

    def large(made: ScriptedWorker) -> None:
        nonlocal worker
        worker = made
        made.blocks.change(NAMES[:100])
        made.blocks.page_size = 60
        made.blocks.before_page = changes

    await scene.follow()
    await scene.worker("d0", prepare=large)
    await until(lambda: bool(scene.index.holders))
    await scene.agree(worker)
    assert worker.blocks.asked == [0, 60, 0, 60, 0, 60]


async def test_a_worker_that_keeps_no_moment_is_left_for_a_while(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_follower, "FIRST_PAUSE_S", 60.0)
    worker: ScriptedWorker

    async def changes(offset: int) -> None:
        worker.blocks.change(NAMES[200 + len(worker.blocks.asked) :][:1])

    def large(made: ScriptedWorker) -> None:
        nonlocal worker
        worker = made
        made.blocks.change(NAMES[:100])
        made.blocks.page_size = 60
        made.blocks.before_page = changes
        made.blocks.forgets = True

    await scene.follow()
    await scene.worker("d0", prepare=large)
    await until(lambda: worker.blocks.asked == [0, 60])
    await worker.blocks.store(NAMES[150])  # an event does not begin it before its time
    await until(lambda: scene.index.lacks("d0") is not None and bool(scene.index.lacks("d0").early))  # type: ignore[union-attr]
    assert worker.blocks.asked == [0, 60]
    assert not scene.index.holders


async def test_a_worker_that_does_not_answer_is_asked_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_follower, "PAGE_TIMEOUT_S", 0.05)
    silent = 3

    async def silence(offset: int) -> None:
        nonlocal silent
        silent -= 1
        if silent >= 0:
            await asyncio.Event().wait()

    def prepare(worker: ScriptedWorker) -> None:
        worker.blocks.change(NAMES[:5])
        worker.blocks.before_page = silence

    await scene.follow()
    worker = await scene.worker("d0", prepare=prepare)
    await until(lambda: bool(scene.index.holders))
    await scene.agree(worker)
    assert worker.blocks.asked == [0, 0, 0, 0]


async def test_a_worker_that_knows_no_snapshots_is_left_in_peace(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, kv_follower.__name__)
    await scene.follow()
    await scene.worker("d0", tells_blocks=False)
    await until(lambda: "does not tell" in caplog.text)
    other = await scene.worker("d1", prepare=lambda w: w.blocks.change(NAMES[:5]))
    await scene.agree(other)
    assert caplog.text.count("does not tell") == 1


async def test_an_event_of_another_life_asks_once_and_is_dropped(scene: Scene) -> None:
    await scene.follow()
    worker = await scene.worker("d0", prepare=lambda w: w.blocks.change(NAMES[:5]))
    await scene.agree(worker)
    await worker.blocks.send(KVEvents(worker="d0", serial=5000, stored=NAMES[9]))
    await until(lambda: len(worker.blocks.asked) == 2)
    await until(lambda: scene.follower._lives["d0"].asking is None, what="the end of asking")
    await scene.agree(worker)
    assert worker.blocks.asked == [0, 0]


async def test_a_snapshot_that_told_nothing_new_is_followed_by_a_pause(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with one id: each event of the other one looks like a gap."""
    monkeypatch.setattr(kv_follower, "FIRST_PAUSE_S", 60.0)
    await scene.follow()
    worker = await scene.worker("d0", prepare=lambda w: w.blocks.change(NAMES[:5]))
    await scene.agree(worker)
    for serial in range(5000, 5050):
        await worker.blocks.send(KVEvents(worker="d0", serial=serial, stored=NAMES[9]))
        await asyncio.sleep(0)
    await worker.blocks.store(NAMES[6])  # what can be followed still is
    await until(lambda: scene.index.holders["d0"] == worker.blocks.numbers)
    assert worker.blocks.asked == [0, 0]


async def test_a_dead_worker_is_forgotten_and_its_late_events_are_ignored(scene: Scene) -> None:
    await scene.follow()
    worker = await scene.worker("d0", prepare=lambda w: w.blocks.change(NAMES[:5]))
    other = await scene.worker("d1", prepare=lambda w: w.blocks.change(NAMES[:7]))
    await scene.agree(worker)
    await scene.agree(other)
    await worker.die()
    await until(lambda: "d0" not in scene.index, what="expiry")
    late = KVEvents(worker="d0", serial=2, stored=NAMES[9])
    await other.blocks.send(late, other.blocks.change(NAMES[7:8]))
    await scene.agree(other)
    assert scene.index.holders.keys() == {"d1"}


async def test_a_new_life_under_the_same_name_starts_from_nothing(scene: Scene) -> None:
    """Started again within the registry's time to live: there was no word that the first one is gone."""
    await scene.follow()
    first = await scene.worker("d0", prepare=lambda w: w.blocks.change(NAMES[:5]))
    await scene.agree(first)
    await until(lambda: scene.follower._lives["d0"].beat > 0, what="a beat")
    await first.bus.close()
    second = await scene.worker("d0", prepare=lambda w: w.blocks.change(NAMES[20:22]))
    await until(lambda: len(second.blocks.asked) > 0)
    await scene.agree(second)


async def test_stores_other_models_and_nonsense_are_passed_over(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    await scene.follow()
    worker = await scene.worker("d0", prepare=lambda w: w.blocks.change(NAMES[:5]))
    await scene.agree(worker)
    node = WorkerInfo(worker_id="s0", role="kvstore", model=MODEL, status="ok", layout=LAYOUT)
    other = msgspec.structs.replace(worker.info(), worker_id="d9", model="other")
    for info in (node, other):
        await worker.bus.registry().put(info)
        await worker.blocks.send(KVEvents(worker=info.worker_id, serial=1, stored=NAMES[0]))
    await worker.bus.publish(subjects.kv_events(), b"\xff")
    await worker.bus.publish(subjects.kv_events(), encode(KVEvents(worker="d0", serial=2, stored=b"123")))
    await worker.blocks.store(NAMES[8])
    await scene.agree(worker)
    await until(lambda: caplog.text.count("dropped a message") == 2)
    assert scene.index.holders.keys() == {"d0"}
