"""A folder's runs, put together again before they go into the index."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import pytest

from distserve.kv.hashing import pack, unpack
from distserve_kvstore.arena import Arena
from distserve_kvstore.columns import Entries
from distserve_kvstore.disk import DiskTier, RecoveredRun
from distserve_kvstore.disk_io import DiskIo
from distserve_kvstore.eviction import make_policy
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.index import BlockIndex
from distserve_kvstore.restoring import MAX_BLOCKS, joined, restore
from distserve_kvstore.tier_state import TierState
from tests.unit.kvstore.stored_blocks import ALIGNED, OPTIONS, chain, opened, records

ROOT = bytes(32)


def run(hashes: list[bytes], start: int, first_place: int, parent: bytes = ROOT, name: str = "c") -> RecoveredRun:
    return RecoveredRun(pack(hashes), parent, start, "t", name, range(first_place, first_place + len(hashes)))


def cut(hashes: list[bytes], width: int, first_place: int, name: str = "c") -> list[RecoveredRun]:
    """A chain in runs of this many blocks."""
    return [
        run(hashes[i : i + width], i, first_place + i, hashes[i - 1] if i else ROOT, name)
        for i in range(0, len(hashes), width)
    ]


def holdings_over(disk: DiskIo, arena: Arena) -> Holdings:
    index = BlockIndex(1024)
    policy = make_policy("lru", index, {"dram": 16, "disk": 1024}, 0.0)
    holdings = Holdings(arena, index, policy, {"dram": TierState("dram"), "disk": TierState("disk")})
    holdings.free_places = disk.free
    return holdings


def test_what_follows_one_another_is_one_run_whatever_lay_between() -> None:
    a, b = chain("a", 50), chain("b", 40)
    runs = [*cut(a, 1, 0, "a"), *cut(b, 4, 100, "b")]
    random.Random(1).shuffle(runs)
    together = list(joined(runs))
    found = {parts[0].conversation: parts for parts in together}
    assert len(together) == 2
    for name, hashes in (("a", a), ("b", b)):
        assert [h for part in found[name] for h in unpack(part.hashes)] == hashes
    assert [p for part in found["b"] for p in part.places] == list(range(100, 140))


def test_other_conversations_and_gaps_and_branches_begin_anew_and_nothing_is_lost() -> None:
    a, b = chain("a", 12), chain("b", 4)
    branch = run(b, 4, 200, a[3])
    runs = [*cut(a[:8], 4, 0), branch, *cut(a, 4, 0, "other")[2:], run(chain("c", 2), 7, 300, a[11])]
    together = list(joined(runs[::-1]))
    assert len(together) == 4
    assert sorted(id(r) for r in itertools.chain(*together)) == sorted(map(id, runs))
    starts = [parts[0].start for parts in together]
    assert starts == sorted(starts), "parents come before their children"


def test_a_very_long_chain_is_cut() -> None:
    hashes = chain("a", 2 * MAX_BLOCKS)
    together = list(joined(cut(hashes, 64, 0)))
    assert [sum(len(r.places) for r in parts) for parts in together] == [MAX_BLOCKS, MAX_BLOCKS]


async def test_short_runs_take_few_inserts_and_no_work_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = [chain(f"{i}", 12) for i in range(10)]
    with opened(tmp_path) as (tier, _):
        for depth in range(12):
            tier.append([records(c, ALIGNED, conversation=f"{i}")[depth] for i, c in enumerate(chains)])
    tier, runs = DiskTier.open(tmp_path, ALIGNED, OPTIONS)
    assert len(runs) == 120
    disk, arena = DiskIo(tier, TierState("disk")), Arena(ALIGNED, 16)
    holdings = holdings_over(disk, arena)
    calls: list[int] = []
    real = BlockIndex.insert

    def insert(self: BlockIndex, hashes: bytes, parent: bytes, start: int, tenant: str, conversation: str) -> Entries:
        calls.append(len(hashes))
        return real(self, hashes, parent, start, tenant, conversation)

    monkeypatch.setattr(BlockIndex, "insert", insert)
    await restore(holdings, disk, runs)
    assert len(calls) == 10
    assert not disk._upkeep
    assert holdings.num_blocks["disk"] == 120
    index = holdings.index
    for c in chains:
        entries = index.find(pack(c))
        assert index.chain_from(int(entries[-1])).tolist() == entries.tolist()
    places = {h: p for r in runs for h, p in zip(unpack(r.hashes), r.places, strict=True)}
    everything = index.entries()
    assert {index.hash_of(e): int(index.disk[e]) for e in everything.tolist()} == places
    holdings.check()
    await disk.close(10)
    arena.close()


async def test_a_run_that_contradicts_another_costs_only_itself(tmp_path: Path) -> None:
    with opened(tmp_path) as (tier, _):
        tier.append(records(chain("a", 9), ALIGNED))
    tier, runs = DiskTier.open(tmp_path, ALIGNED, OPTIONS)
    hashes = unpack(runs[0].hashes)
    places = list(runs[0].places)
    disk, arena = DiskIo(tier, TierState("disk")), Arena(ALIGNED, 16)
    holdings = holdings_over(disk, arena)
    holdings.index.insert(hashes[7], bytes([1]) * 32, 30)  # known, at another depth
    parts = [
        RecoveredRun(pack(hashes[i : i + 3]), hashes[i - 1] if i else ROOT, i, "t", "c", places[i : i + 3])
        for i in (0, 3, 6)
    ]
    await restore(holdings, disk, parts)
    async with asyncio.timeout(10):
        while disk._upkeep:
            await asyncio.wait(set(disk._upkeep))
    assert holdings.num_blocks["disk"] == 6
    assert disk.stats.num_blocks == 6, "those that are left out are freed"
    await disk.close(10)
    arena.close()
