"""The index of blocks: names to entries, chains, what it refuses, growth."""

from __future__ import annotations

import os
from pathlib import Path as FilePath

import numpy as np
import pytest

from distserve.errors import KVError
from distserve_kvstore.columns import BATCH, NORMAL, Keys
from distserve_kvstore.hash_table import HashTable, NameTable
from distserve_kvstore.index import BlockIndex
from tests.unit.kvstore.block_trees import ALIKE, Path, name, names, run

LONG: Path = (0, 1, 2, 3, 2, 1, 0)


def filled(tip: Path = LONG) -> BlockIndex:
    index = BlockIndex()
    index.insert(names(run(tip)), name(()), 0)
    return index


def test_a_prefix_ends_where_no_tier_has_the_block() -> None:
    index = filled()
    entries = index.find(names(run(LONG)))
    index.dram[entries[:2]] = 0
    index.disk[entries[2]] = 2**40
    index.object[entries[4:]] = 3
    assert index.longest_prefix(names(run(LONG))).tolist() == entries[:3].tolist()
    assert not len(index.longest_prefix(b""))


def test_a_chain_is_read_back_from_its_end() -> None:
    index = filled()
    tip = int(index.find(name(LONG))[0])
    assert index.hashes_of(index.chain_from(tip)) == names(run(LONG))
    assert index.parent_hash_of(int(index.chain_from(tip)[0])) == name(())


def test_pieces_of_a_chain_join_in_whatever_order_they_come() -> None:
    index = BlockIndex()
    for start, stop in ((4, 6), (6, 7), (0, 2), (2, 4)):
        index.insert(names(run(LONG[:stop], start)), name(LONG[:start]), start)
        index.check()
    assert index.hashes_of(index.chain_from(int(index.find(name(LONG))[0]))) == names(run(LONG))


def test_names_that_share_their_first_eight_bytes_are_told_apart() -> None:
    index = BlockIndex()
    tips = [(choice,) for choice in range(1, 400, 2)]
    for tip in tips:
        index.insert(name(tip), name(()), 0)
    assert all(name(tip).startswith(ALIKE) for tip in tips)
    entries = index.find(names(tips))
    assert index.hashes_of(entries) == names(tips)
    assert index.find(ALIKE + bytes(24)).tolist() == [-1]
    index.remove(entries[::2])
    index.check()
    assert (index.find(names(tips)) >= 0).tolist() == [False, True] * 100


def test_it_grows_and_shrinks_without_losing_a_name() -> None:
    index, rng = BlockIndex(1), np.random.default_rng(3)
    chains = [rng.bytes(32 * int(rng.integers(1, 300))) for _ in range(60)]
    for chain in chains:
        index.insert(chain, name(()), 0)
    index.check()
    capacity = index.capacity
    for _ in range(5):  # as much again, and out again: numbers are used again, nothing rots
        index.remove(np.concatenate([index.find(chain) for chain in chains[::2]]))
        index.check()
        for chain in chains[::2]:
            index.insert(chain, name(()), 0)
    index.check()
    assert index.capacity == capacity
    assert all((index.find(chain) >= 0).all() for chain in chains)


def test_reserved_room_is_not_memory() -> None:
    before = resident_bytes()
    index = BlockIndex(20_000_000)
    index.insert(names(run(LONG)), name(()), 0)
    assert index.capacity == 20_000_000
    assert resident_bytes() - before < 20_000_000, "a byte a block at most"


def resident_bytes() -> int:
    return int(FilePath("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_entry_costs_less_than_two_hundred_bytes() -> None:
    index = BlockIndex(50_000)
    index.insert(np.random.default_rng(1).bytes(32 * 50_000), name(()), 0)
    assert index.num_bytes / len(index) < 200


CONTRADICTIONS = {
    "a hash twice": (names([(9,), (9,)]), name(()), 0),
    "one twice that is known": (names([(0,), (0,)]), name(()), 0),
    "another depth": (names(run(LONG[:2])), name((5,)), 1),
    "another parent": (name(LONG[:3]), name((5, 5)), 2),
    "another order": (names([(0,), LONG[:3]]), name(()), 0),
    "a stranger in between": (names([(0,), (7,), LONG[:3]]), name(()), 0),
    "too deep under its parent": (name((0, 5)), name((0,)), 3),
    "its own parent": (name((5,)), name((5,)), 4),
    "not where the waiting one would have its parent": (name((6, 6)), name((6,)), 4),
    "half a hash": (name((5,))[:16], name(()), 0),
    "half a parent": (name((5,)), b"", 0),
    "above the first": (name((5,)), name(()), -1),
}


@pytest.mark.parametrize("why", CONTRADICTIONS)
def test_what_contradicts_itself_or_the_index_changes_nothing(why: str) -> None:
    index = filled()
    index.insert(name((6, 6, 6)), name((6, 6)), 2)
    with pytest.raises(KVError):
        index.insert(*CONTRADICTIONS[why])
    index.check()
    assert len(index) == len(LONG) + 1


def test_what_is_in_use_is_not_removed() -> None:
    index = filled()
    entries = index.find(names(run(LONG)))
    index.num_pins[entries[6]] = 1
    index.dram[entries[5]] = 0
    for wrong in (entries, entries[5:6], entries[:2], entries[[4, 4]], np.array([500], np.int32)):
        with pytest.raises(KVError):
            index.remove(wrong)
        index.check()
    assert len(index) == 7
    index.num_pins[entries[6]] = 0
    assert index.remove_empty(entries[6:]).tolist() == [entries[6]]
    index.dram[entries[5]] = -1
    assert index.remove_empty(entries[5:6]).tolist() == entries[5::-1].tolist()
    assert len(index) == 0


def test_a_block_lost_in_mid_chain_stays_as_a_gap_until_its_descendants_are_gone() -> None:
    index = filled()
    entries = index.find(names(run(LONG)))
    index.dram[entries] = 0
    index.dram[entries[3]] = -1
    assert not len(index.remove_empty(entries[3:4]))
    assert len(index.longest_prefix(names(run(LONG)))) == 3
    below = entries[:3:-1]
    index.dram[below] = -1
    assert index.remove_empty(below).tolist() == entries[:2:-1].tolist()


def test_low_priority_ends_when_a_block_comes_with_another() -> None:
    index = BlockIndex()
    entries = index.insert(names(run(LONG)), name(()), 0, priority="batch")
    index.insert(names(run(LONG[:2])), name(()), 0)
    assert index.priority[entries].tolist() == [NORMAL] * 2 + [BATCH] * 5


def test_tenants_are_forgotten_with_their_last_block() -> None:
    index = BlockIndex()
    for i in range(50):
        entries = index.insert(name((i,)), name(()), 0, f"tenant {i}")
        assert index.tenant_of(int(entries[0])) == f"tenant {i}"
        index.remove(entries)
    assert index.tenant[entries[0]] == 0, "its number is used again"
    assert not len(index.of_tenant("tenant 49"))


def test_a_table_says_when_it_does_not_know_an_entry() -> None:
    table, hashes = HashTable(8), random_names(8)
    table.add(np.arange(4, dtype=np.int32), hashes)
    with pytest.raises(KVError, match="not in the table"):
        table.discard(np.array([5], np.int32), hashes)


def test_a_table_goes_on_at_its_beginning_after_its_end() -> None:
    """All names have one home, the last slot."""
    table, hashes = HashTable(500, multiplier=1), random_names(500)
    hashes[:, 0] = np.uint64(2**64 - 1)
    everything = np.arange(500, dtype=np.int32)
    for some in np.split(everything, 10):
        table.add(some, hashes)
    assert table.find(hashes, hashes).tolist() == everything.tolist()
    table.discard(everything[::3], hashes)
    assert table.find(hashes, hashes).tolist() == [-1 if i % 3 == 0 else i for i in range(500)]


def test_a_table_doubles_bit_by_bit_while_names_come_and_go() -> None:
    """Numbers are given to other names while the smaller table still leads to them."""
    table, hashes, rng = NameTable(3000), random_names(20_000), np.random.default_rng(7)
    names = np.zeros_like(hashes)
    known: dict[int, int] = {}  # entry -> which name
    vacant, next_name, both = list(range(12_000)), 0, 0
    while next_name < 15_000:
        entries = np.array([vacant.pop() for _ in range(40)], np.int32)
        which = np.arange(next_name, next_name + 40)
        names[entries] = hashes[which]
        table.add(entries, names)
        known.update(zip(entries.tolist(), which.tolist(), strict=True))
        next_name += 40
        gone = rng.choice(np.array(sorted(known), np.int32), 10, replace=False)
        table.discard(gone, names)
        names[gone] = 0
        for entry in gone.tolist():
            del known[entry]
            vacant.append(entry)
        both += table._older is not None
        assert table.check(names[:12_000])
    assert both > 10, "it was never looked at between two tables"
    assert len(table) == len(known)
    forgotten = np.setdiff1d(np.arange(next_name), list(known.values()))
    assert (table.find(hashes[forgotten], names) < 0).all()


def test_zeros_are_no_hash() -> None:
    index = filled()
    index.remove(index.find(names(run(LONG))))
    assert index.find(bytes(32)).tolist() == [-1]
    with pytest.raises(KVError, match="all zeros"):
        index.insert(bytes(32), name(()), 0)


def random_names(n: int) -> Keys:
    return np.random.default_rng(0).integers(1, 2**63, (n, 4), np.uint64)
