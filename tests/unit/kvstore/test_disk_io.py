"""The disk tier as the event loop uses it: what is under way is nobody else's, and waiting is no fault."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from distserve.errors import DiskFailed
from distserve_kvstore.disk import DiskTier, space
from distserve_kvstore.disk_io import DiskIo
from distserve_kvstore.promotion import Wanted
from distserve_kvstore.tier_state import TierState
from tests.unit.kvstore.stored_blocks import ALIGNED, OPTIONS, chain, found, opened, records, rows
from tests.waiting import until

LONG_S = 20.0


@asynccontextmanager
async def disk_io(folder: Path, *, stuck_s: float = 60.0) -> AsyncIterator[tuple[DiskIo, TierState]]:
    tier, _ = DiskTier.open(folder, ALIGNED, OPTIONS)
    state = TierState("disk", stuck_s=stuck_s)
    io = DiskIo(tier, state)
    try:
        async with asyncio.timeout(LONG_S):
            yield io, state
            tier.check()
    finally:
        await io.close(LONG_S)


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A call of DiskTier that waits: (it has begun, it may go on)."""
    began, go_on = threading.Event(), threading.Event()
    real: Callable[..., object] = getattr(DiskTier, name)

    def waiting(*args: object) -> object:
        began.set()
        assert go_on.wait(LONG_S)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, name, waiting)
        try:
            yield began, go_on
        finally:
            go_on.set()


async def is_set(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, LONG_S)


async def served(io: DiskIo, hashes: list[bytes], places: list[int]) -> list[object]:
    into = rows(len(hashes), ALIGNED)
    wanted = [Wanted(h, p, i) for i, (h, p) in enumerate(zip(hashes, places, strict=True))]
    return list(await io.read(wanted, [row.data for row in into]))


@contextmanager
def syncs_fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        yield


async def test_a_retry_beside_a_deletion_leaves_blocks_that_came_after_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = chain("old", 5), chain("new", 5)
    async with disk_io(tmp_path) as (io, _):
        places = await io.append(records(old, ALIGNED))
        with held(monkeypatch, "flush") as (began, go_on):
            busy = asyncio.create_task(io._writer.run(io._disk.flush))
            await is_set(began)
            deleting = asyncio.create_task(io.forget(places))
            await asyncio.sleep(0)
            writing = asyncio.create_task(io.append(records(new, ALIGNED)))
            await asyncio.sleep(0)
            retrying = asyncio.create_task(io.retry())
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.gather(busy, deleting, retrying)
        there = await writing
        assert set(there) & set(places), "a place must have been used again, or this shows nothing"
        assert await served(io, new, there) == [None] * 5
        assert io.num_to_forget == 0
    with opened(tmp_path) as (_, after):
        assert set(after) == set(new)


async def test_a_deletion_that_failed_is_finished_later_and_touches_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = chain("old", 5), chain("new", 5)
    async with disk_io(tmp_path) as (io, _):
        places = await io.append(records(old, ALIGNED))
        with syncs_fail(monkeypatch):
            with pytest.raises(DiskFailed):
                await io.forget(places)
            await io.retry()
            assert io.num_to_forget == 5
        there = await io.append(records(new, ALIGNED))
        assert not set(there) & set(places)
        # Another one's success makes the first one's certain too; only then are the places free.
        await io.forget(there[:1])
        assert io.num_to_forget == 0
        await io.retry()
        assert await served(io, new[1:], there[1:]) == [None] * len(there[1:])
    with opened(tmp_path) as (_, after):
        assert not set(after) & {*old, new[0]}


async def test_a_deletion_whose_asker_goes_away_is_done_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = chain("old", 5)
    async with disk_io(tmp_path) as (io, _):
        places = await io.append(records(old, ALIGNED))
        with held(monkeypatch, "forget") as (began, go_on):
            asking = asyncio.create_task(io.forget(places))
            await is_set(began)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert io.num_to_forget == 5
            go_on.set()
            await asyncio.wait(set(io._upkeep))
        assert io.num_to_forget == 0
        assert io.stats.num_blocks == 0


async def test_waiting_for_the_thread_is_no_stuck_disk(tmp_path: Path) -> None:
    async with disk_io(tmp_path, stuck_s=0.4) as (io, state):
        pace = threading.Event()
        jobs = [asyncio.create_task(io._writer.run(lambda: pace.wait(0.2))) for _ in range(5)]
        await asyncio.sleep(0)
        writing = asyncio.create_task(io.append(records(chain("a", 2), ALIGNED)))
        said = set()
        while not writing.done():
            said.add(state.trouble("read"))
            await asyncio.sleep(0.02)
        await asyncio.gather(*jobs)
        assert said == {""}
        assert state.latency["write"].total < 0.9, "the time in the queue is not the disk's"


@pytest.mark.parametrize("name", ["compact", "forget", "free", "look"])
async def test_any_call_of_the_writer_that_hangs_is_a_stuck_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with disk_io(tmp_path, stuck_s=0.1) as (io, state):
        places = await io.append(records(chain("a", 2), ALIGNED))
        with held(monkeypatch, name) as (began, go_on):
            if name == "free":
                io.free(places)
            hanging = {"compact": io.compact, "forget": lambda: io.forget(places), "look": io.look}
            task = asyncio.ensure_future(hanging[name]()) if name in hanging else next(iter(io._upkeep))
            await is_set(began)
            await until(lambda: bool(state.trouble("read")), LONG_S)
            assert "a write has not come back" in state.trouble("read")
            go_on.set()
            await task
        assert state.state == "ok"


async def test_nothing_to_free_is_nothing_to_do(tmp_path: Path) -> None:
    async with disk_io(tmp_path) as (io, _):
        io.free([])
        assert not io._upkeep


async def test_a_file_system_without_room_is_said_and_used_as_soon_as_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 4 << 20
    monkeypatch.setattr(
        space.FileSystem, "of", classmethod(lambda cls, folder: cls(total_bytes=100 << 20, free_bytes=free_bytes))
    )
    options = OPTIONS.__class__(8 << 20, OPTIONS.segment_bytes, min_free_fraction=0.05)
    tier, _ = DiskTier.open(tmp_path, ALIGNED, options)
    state = TierState("disk")
    io = DiskIo(tier, state)
    assert tier.stats().usable_blocks == 0
    assert "its file system can spare 0 bytes" in state.trouble("write")
    assert state.failing("write")
    assert not state.trouble("read")
    assert len(state.reasons) == 1
    await io.retry()
    assert state.failing("write")
    free_bytes = 60 << 20
    await io.retry()
    assert state.reasons == []
    assert not state.failing("write")
    assert io.num_free > 500
    hashes = chain("a", 100)
    places = await io.append(records(hashes, ALIGNED))
    assert io.stats.num_segments < 10, "segments are as large as if there had always been room"
    assert await served(io, hashes, places) == [None] * 100
    await io.close(LONG_S)
    tier, runs = DiskTier.open(tmp_path, ALIGNED, options)
    assert set(found(runs)) == set(hashes)
    tier.close()
