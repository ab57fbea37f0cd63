"""Deletions: hidden at once, out of every tier, and "done" only when that is for good."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from distserve.bus.base import Bus
from distserve.errors import DiskFailed, ObjectStoreDown
from distserve_kvstore.deletions import SLICE
from distserve_kvstore.node import Node
from distserve_kvstore.objects import ObjectRun, ObjectTier
from distserve_kvstore.offers import Owner
from distserve_kvstore.promotion import Promotion
from distserve_kvstore.upkeep import restore
from tests.unit.kvstore.tier_parts import ROOT, Parts, names, parts
from tests.waiting import until


def num_objects(folder: Path) -> int:
    return sum(path.is_file() for path in (folder / "objects").rglob("*"))


async def stored(at: Parts, *numbers: int) -> None:
    """In memory, on disk and in an object."""
    entries = at.adopt(*numbers)
    writing = asyncio.create_task(at.write_back.run())
    await until(lambda: at.holdings.num_blocks["disk"] >= len(numbers))
    writing.cancel()
    await at.archive.put(entries)
    assert num_objects(at.folder) > 0


async def test_what_the_disk_refuses_to_forget_is_not_called_done_until_it_has_and_objects_go_all_the_same(
    tmp_path: Path,
) -> None:
    async with parts(tmp_path) as at:
        await stored(at, 1, 2, 3)
        at.faults.refuses = True
        with pytest.raises(DiskFailed, match="says the test"):
            await at.deletions.delete("t", "c")
        assert at.holdings.is_here(names(1, 2, 3)) == [False] * 3
        assert num_objects(tmp_path) == 0
        with pytest.raises(DiskFailed):
            await at.deletions.delete("t", "c")
        with pytest.raises(DiskFailed):
            await at.deletions.delete("t")  # all of the tenant's: that one's too
        assert await at.deletions.delete("t", "another") == 0
        at.faults.refuses = False
        at.states["disk"].try_again("write")
        assert await at.deletions.delete("t", "c") == 0
    assert at.found_on_disk() == []


async def test_what_is_just_being_written_is_forgotten_before_the_deletion_is_done(tmp_path: Path) -> None:
    async with parts(tmp_path) as at:
        at.faults.gate.clear()
        writing = asyncio.create_task(at.write_back.run())
        at.adopt(1, 2, 3)
        await until(lambda: at.faults.num_appends == 1, what="the append")
        deleting = asyncio.create_task(at.deletions.delete("t", "c"))
        await until(lambda: not any(at.holdings.is_here(names(1, 2, 3))))
        assert not deleting.done()
        at.faults.gate.set()
        assert await asyncio.wait_for(deleting, 20) == 3
        assert at.disk.num_to_forget == 0
        writing.cancel()
    assert at.found_on_disk() == []


async def test_what_is_just_being_put_into_an_object_is_deleted_there_before_the_deletion_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, began = asyncio.Event(), asyncio.Event()
    real = ObjectTier.put

    async def put(self: ObjectTier, run: ObjectRun) -> str:
        began.set()
        await asyncio.wait_for(gate.wait(), 30)
        return await real(self, run)

    monkeypatch.setattr(ObjectTier, "put", put)
    async with parts(tmp_path, write_through=False) as at:
        mine, theirs = at.adopt(1, 2, 3), at.adopt(11, 12, owner=Owner("t", "other"))
        putting = asyncio.create_task(at.archive.put(np.concatenate((mine, theirs))))
        await asyncio.wait_for(began.wait(), 10)
        deleting = asyncio.create_task(at.deletions.delete("t", "c"))
        await until(lambda: not any(at.holdings.is_here(names(1, 2, 3))))
        assert not (await asyncio.wait({deleting}, timeout=0.2))[0]
        gate.set()
        assert await asyncio.wait_for(deleting, 20) == 3
        await asyncio.wait_for(putting, 20)
        assert at.objects.num_to_delete == 0
        assert num_objects(tmp_path) == 1  # the other's
        assert at.holdings.is_here(names(1, 2, 3, 11, 12)) == [False] * 3 + [True] * 2


async def test_an_object_of_what_was_deleted_that_cannot_be_deleted_yet_is_not_called_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, began = asyncio.Event(), asyncio.Event()
    real_put, real_delete = ObjectTier.put, ObjectTier.delete
    down = True

    async def put(self: ObjectTier, run: ObjectRun) -> str:
        began.set()
        await asyncio.wait_for(gate.wait(), 30)
        return await real_put(self, run)

    async def delete(self: ObjectTier, names: Sequence[str]) -> None:
        if down:
            raise ObjectStoreDown("no, says the test", url="file:", reason="the test", retry_after_s=1.0)
        await real_delete(self, names)

    monkeypatch.setattr(ObjectTier, "put", put)
    monkeypatch.setattr(ObjectTier, "delete", delete)
    async with parts(tmp_path, write_through=False) as at:
        putting = asyncio.create_task(at.archive.put(at.adopt(1, 2, 3)))
        await asyncio.wait_for(began.wait(), 10)
        deleting = asyncio.create_task(at.deletions.delete("t", "c"))
        await until(lambda: not any(at.holdings.is_here(names(1, 2, 3))))
        gate.set()
        with pytest.raises(ObjectStoreDown, match="says the test"):
            await asyncio.wait_for(deleting, 20)
        await asyncio.wait_for(putting, 20)
        down = False
        assert await at.deletions.delete("t", "c") == 0
        assert num_objects(tmp_path) == 0


async def test_what_is_deleted_before_its_turn_to_be_put_into_an_object_is_never_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_puts = 0

    async def put(self: ObjectTier, run: ObjectRun) -> str:
        nonlocal num_puts
        num_puts += 1
        raise AssertionError

    monkeypatch.setattr(ObjectTier, "put", put)
    async with parts(tmp_path, write_through=False) as at:
        entries = at.adopt(1, 2, 3)
        putting = asyncio.create_task(at.archive.put(entries))
        at.holdings.doomed.add(entries)
        assert len(await asyncio.wait_for(putting, 10)) == 0
        assert num_puts == 0
        at.holdings.remove_doomed(entries[::-1])


async def test_a_big_tenant_is_hidden_at_once_and_removed_while_others_are_served(tmp_path: Path) -> None:
    async with parts(tmp_path) as at:
        index, num = at.holdings.index, 8 * SLICE
        for first in range(1, num, 64):
            entries = index.insert(names(*range(first, first + 64)), ROOT, 0, "t", f"c{first}")
            number = at.objects.number_of(f"o{first}", 0)
            at.holdings.enter(entries, "object", [number] * 64)
        at.objects.delete_soon(range(num // 64))  # there are none in truth
        at.objects._to_delete.clear()
        deleting = asyncio.create_task(at.deletions.delete("t"))
        left: list[int] = []
        while not deleting.done():
            await asyncio.sleep(0)
            left.append(len(index))
            assert not any(at.holdings.is_here(names(1, num // 2, num)))
        assert await deleting == num
        assert max(-np.diff(left)) <= SLICE  # at one go
        assert len(index) == 0


async def test_what_was_offered_again_while_the_rest_is_removed_stays(tmp_path: Path) -> None:
    async with parts(tmp_path, write_through=False) as at:
        at.adopt(1, 2, 3)
        deleting = asyncio.create_task(at.deletions.delete("t"))
        await asyncio.sleep(0)  # hidden
        assert at.holdings.is_here(names(1, 2, 3)) == [False] * 3
        at.adopt(1, 2, 3)
        await deleting
        assert at.holdings.is_here(names(1, 2, 3)) == [True] * 3


async def test_the_list_of_objects_does_not_bring_back_what_was_deleted_while_it_was_read(tmp_path: Path) -> None:
    async with parts(tmp_path) as at:
        node = cast(Node, SimpleNamespace(holdings=at.holdings, objects=at.objects, deletions=at.deletions))

        def found(number: int, tenant: str, conversation: str) -> int:
            hashes = tuple(bytes([number, i]) * 16 for i in range(4))
            return restore(node, f"o{number}", hashes, ROOT, 0, tenant, conversation)

        await at.deletions.delete("gone")
        await at.deletions.delete("t", "over")
        assert found(1, "gone", "any") == 0
        assert found(2, "t", "over") == 0
        assert at.objects.num_to_delete == 2
        assert found(3, "t", "stays") == 4
        at.deletions.listing_ended()
        assert found(4, "gone", "anew") == 4  # put there since
        at.objects._to_delete.clear()  # there are none in truth


async def test_what_is_deleted_before_its_read_begins_leaves_the_disk_once(tmp_path: Path) -> None:
    async with parts(tmp_path) as at:
        await stored(at, 1, 2, 3)
        entries = at.holdings.index.find(names(1, 2, 3))
        at.holdings.leave(entries[::-1], "dram", "room")
        promotion = Promotion(at.holdings, {"disk": at.disk}, at.states)
        coming = promotion.bring(entries.tolist())
        at.holdings.doomed.add(entries)
        removed = at.holdings.remove_doomed(entries[::-1])
        await asyncio.wait_for(asyncio.wait(coming), 10)
        assert not any(one.result() for one in coming)
        await until(lambda: not promotion.num_blocks)
        assert at.holdings.num_blocks["disk"] == 0
        assert len(removed.places) == 3
        await at.objects.delete(removed.objects)


class SilentBus:
    """Nobody answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_copy_that_is_being_made_of_what_was_deleted_ends(tmp_path: Path) -> None:
    async with parts(tmp_path, write_through=False) as at:
        bus = SilentBus()
        at.replication._bus = cast(Bus, bus)
        at.replication._peers = lambda: ["kvstore-me", "kvstore-you"]
        at.replication._replicas = 2
        running = asyncio.create_task(at.replication.run())
        at.replication.want(names(1), at.adopt(1, 2))
        await asyncio.wait_for(bus.asked.wait(), 10)
        assert at.holdings.pins.num_held == 2
        await at.deletions.delete("t", "another")
        assert at.holdings.pins.num_held == 2
        await at.deletions.delete("t", "c")
        await until(lambda: not at.holdings.pins.num_held, what="the copy's end")
        assert at.arena.num_used == 0
        assert not running.done()
        running.cancel()
        await asyncio.wait({running})


async def test_a_copy_that_waits_is_not_made_of_what_was_deleted(tmp_path: Path) -> None:
    async with parts(tmp_path, write_through=False) as at:
        at.replication._peers = lambda: ["kvstore-me", "kvstore-you"]
        at.replication._replicas = 2
        mine = at.adopt(1, 2)
        theirs = at.adopt(11, 12, owner=Owner("t", "other"))
        at.replication.want(names(1), mine)
        at.replication.want(names(11), theirs)
        await at.deletions.delete("t", "c")
        assert [w.owner.conversation for w in at.replication._waiting.values()] == ["other"]
        await at.deletions.delete("t")
        assert not at.replication._waiting
