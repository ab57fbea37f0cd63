"""Others have filled the file system: the node goes on in memory, says so, and writes again once there is room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from distserve_kvstore.demotion import Demotion
from distserve_kvstore.disk import space
from tests.unit.kvstore.tier_parts import Parts, names, parts
from tests.waiting import until


class FileSystem:
    """What statvfs says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = 0
        monkeypatch.setattr(
            space.FileSystem,
            "of",
            classmethod(lambda cls, folder: cls(total_bytes=1 << 40, free_bytes=self.free_bytes)),
        )


def demotion_of(at: Parts) -> Demotion:
    demotion = Demotion(at.holdings, at.states, low=0.5, high=0.8, disk=at.disk, write_back=at.write_back, archive=None)
    at.holdings.may_drop_dirty = demotion.may_drop_dirty
    at.holdings.on_added = demotion.wake
    at.write_back.on_full = demotion.disk_full
    return demotion


async def test_memory_goes_on_without_a_disk_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FileSystem(monkeypatch)
    async with parts(tmp_path) as at:
        demotion = demotion_of(at)
        assert demotion.may_drop_dirty()
        assert [r for state in at.states.values() for r in state.reasons] == [
            "disk: no room for blocks: its file system can spare 0 bytes beyond what stays free for others"
        ]
        work = [asyncio.create_task(one) for one in (demotion.run_memory(), demotion.run_disk(), at.write_back.run())]
        for i in range(20):
            assert at.holdings.make_room(10) >= 10
            at.adopt(*range(10 * i + 1, 10 * i + 11))
            await asyncio.sleep(0)
        for task in work:
            task.cancel()


async def test_as_soon_as_there_is_room_what_is_in_memory_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_system = FileSystem(monkeypatch)
    async with parts(tmp_path) as at:
        demotion = demotion_of(at)
        writing = asyncio.create_task(at.write_back.run())
        at.adopt(*range(1, 11))
        file_system.free_bytes = 64 << 20
        await at.disk.retry()
        await until(lambda: at.holdings.num_blocks["disk"] == 10)
        assert not demotion.may_drop_dirty()
        assert all(at.holdings.is_here(names(*range(1, 11))))
        assert at.states["disk"].reasons == []
        writing.cancel()
    assert sum(len(run.places) for run in at.found_on_disk()) == 10


async def test_who_waits_for_room_looks_whether_there_is_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was refused, and nothing goes: only the file system has changed."""
    file_system = FileSystem(monkeypatch)
    file_system.free_bytes = 3 * (1 << 20)
    async with parts(tmp_path) as at:
        held = at.disk.stats.usable_blocks  # as if so many were there
        monkeypatch.setattr(type(at.disk), "num_free", property(lambda io: io.stats.usable_blocks - held))
        asked = asyncio.Event()
        at.write_back.on_full = asked.set
        writing = asyncio.create_task(at.write_back.run())
        at.adopt(1, 2)
        await asyncio.wait_for(asked.wait(), 10)
        assert at.holdings.num_blocks["disk"] == 0
        file_system.free_bytes = 64 << 20
        await until(lambda: at.holdings.num_blocks["disk"] == 2)
        writing.cancel()
