"""What lru and lfu choose, beyond what every policy keeps to (test_eviction_model.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest

from distserve_kvstore.columns import Entries
from distserve_kvstore.eviction import make_policy
from distserve_kvstore.eviction.lfu import WTinyLFU
from distserve_kvstore.eviction.sketch import HIGHEST, SAMPLE, FrequencySketch
from distserve_kvstore.eviction.window import PARTS
from distserve_kvstore.index import BlockIndex
from tests.unit.kvstore.block_trees import Path, name, names, run

Kind = Literal["lru", "lfu"]


class Store:
    """One tier that is emptied down to its capacity after each request."""

    def __init__(self, kind: Kind, capacity: int) -> None:
        self.index = BlockIndex()
        self.policy = make_policy(kind, self.index, {"dram": capacity})
        self.capacity = capacity

    def ask(self, tip: Path, *, batch: bool = False) -> int:
        """How many blocks of it were there."""
        hashes = names(run(tip))
        found = self.index.longest_prefix(hashes)
        self.policy.used(found)
        entries = self.index.insert(hashes, name(()), 0, priority="batch" if batch else "normal")
        self.index.dram[entries] = 1
        self.policy.added(entries[len(found) :], "dram")
        self.evict(len(self.index) - self.capacity)
        return len(found)

    def evict(self, n: int) -> None:
        if n > 0:
            victims = self.policy.victims(n, "dram")
            assert len(victims) == n
            self.index.dram[victims] = -1
            self.policy.removed(victims, "dram")
            self.index.remove(victims)

    def holds(self, tips: Sequence[Path]) -> list[bool]:
        return (self.index.find(names(tips)) >= 0).tolist()


def test_lru_evicts_exactly_the_blocks_longest_unused_and_the_deepest_of_equals() -> None:
    rng = np.random.default_rng(11)
    store, used_at = Store("lru", 40), dict[Path, int]()
    for now in range(600):
        tip = tuple(int(choice) for choice in rng.integers(0, 3, int(rng.integers(1, 7))))
        store.ask(tip)
        used_at.update(dict.fromkeys(run(tip), now))
        while len(used_at) > 40:
            leaves = [path for path in used_at if not any(other[:-1] == path for other in used_at)]
            del used_at[min(leaves, key=lambda path: (used_at[path], -len(path)))]
        assert sorted(store.index.hash_of(e) for e in store.index.entries()) == sorted(map(name, used_at)), now


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_a_beginning_that_many_share_outlives_their_tails(kind: Kind) -> None:
    store = Store(kind, 100)
    shared: Path = (0,) * 20
    for i in range(100):
        assert store.ask((*shared, i, 1, 1, 1, 1, 1, 1)) == (20 if i else 0)


def test_scans_pass_through_lfu_and_sweep_lru() -> None:
    """Ten rounds of the same eight chains, and between them a scan as large as the store."""
    found: dict[Kind, int] = {}
    for kind in ("lru", "lfu"):
        store = Store(kind, 400)
        for now in range(10):
            found[kind] = sum(store.ask((i,) * 15) for i in range(8))
            for i in range(20):
                store.ask((100 + 20 * now + i,) * 20)
    assert found["lru"] == 0
    assert found["lfu"] > 100  # of 120


def test_a_window_of_all_makes_lfu_lru_and_what_is_used_meanwhile_is_not_the_first_to_go() -> None:
    index = BlockIndex()
    policy = WTinyLFU(index, {"dram": 40})
    windows = policy._windows["dram"]
    windows._best = 0  # a hundredth: nearly all goes to probation
    chains = [index.insert(names(run((i,) * 10)), name(()), 0) for i in range(4)]
    for chain in chains:
        index.dram[chain] = 1
        policy.added(chain, "dram")
    windows._best = len(PARTS) - 1
    policy.used(chains[0])
    assert policy.victims(30, "dram").tolist() == [e for chain in chains[1:] for e in chain[::-1]]


def test_what_was_frequent_once_does_not_stay_for_ever_with_lfu() -> None:
    store = Store("lfu", 50)
    for _ in range(20):
        store.ask((0,) * 10)
    for _ in range(40):
        for i in range(1, 8):
            store.ask((i,) * 7)
    assert sum(store.holds(run((0,) * 10))) <= 1  # there is room for one
    assert all(store.holds([(i,) * 7 for i in range(1, 8)]))


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_blocks_of_low_priority_go_first(kind: Kind) -> None:
    store = Store(kind, 30)
    store.ask((1,) * 10)
    for _ in range(3):
        store.ask((2,) * 10, batch=True)
    store.ask((3,) * 10)
    store.evict(10)
    assert store.holds([(1,) * 10, (2,), (3,) * 10]) == [True, False, True]


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_what_waits_for_its_removal_is_named_again_and_what_was_used_since_is_not(kind: Kind) -> None:
    store = Store(kind, 300)
    for i in range(30):
        store.ask((i,) * 10)
    first = store.policy.victims(5, "dram")
    assert store.policy.victims(8, "dram")[:5].tolist() == first.tolist()
    store.policy.used(store.index.chain_from(int(first[0])))
    assert not set(first.tolist()) & set(store.policy.victims(8, "dram").tolist())


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_tiers_are_judged_apart(kind: Kind) -> None:
    """A chain whose end is on disk only may lose its middle from memory, not from disk."""
    index = BlockIndex()
    policy = make_policy(kind, index, {"dram": 10, "disk": 10})
    entries = index.insert(names(run((0,) * 6)), name(()), 0)
    index.dram[entries[:3]] = 1
    index.disk[entries] = 1
    policy.added(entries[:3], "dram")
    policy.added(entries, "disk")
    assert policy.victims(2, "dram").tolist() == entries[2:0:-1].tolist()
    assert policy.victims(2, "disk").tolist() == entries[:3:-1].tolist()
    policy.removed(entries[:3])
    index.dram[entries[:3]] = index.disk[entries[:3]] = -1
    policy.check()


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_naming_victims_does_not_look_at_everything(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries looked at for 20 victims, of 2,000 blocks and of 64,000: no more for more."""
    looked_at: dict[int, int] = {}
    for num_blocks in (2_000, 64_000):
        index = BlockIndex(num_blocks)
        policy = make_policy(kind, index, {"dram": num_blocks // 2})
        rng = np.random.default_rng(1)
        chains = [index.insert(rng.bytes(32 * 20), name(()), 0) for _ in range(num_blocks // 20)]
        for chain in chains:
            index.dram[chain] = 1
            policy.added(chain, "dram")
        policy.victims(1, "dram")  # what was put off until now
        counted = [0]
        index.parent = Counting.of(index.parent, counted)
        policy.victims(20, "dram")
        looked_at[num_blocks] = counted[0]
    assert 0 < looked_at[64_000] <= looked_at[2_000] + 5


class Counting(np.ndarray):  # type: ignore[type-arg]
    """Counts the elements that are read."""

    counted: list[int]

    @classmethod
    def of(cls, array: Entries, counted: list[int]) -> Counting:
        view = array.view(cls)
        view.counted = counted
        return view

    def __getitem__(self, key: object) -> object:  # type: ignore[override]
        found = np.asarray(self)[key]  # type: ignore[index]
        self.counted[0] += np.size(found)
        return found


def keys(n: int, seed: int = 0) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.random.default_rng(seed).integers(0, 2**63, (n, 4), np.uint64)


def test_a_sketch_counts_what_it_is_told_up_to_its_highest() -> None:
    sketch, some = FrequencySketch(1000), keys(50)
    for i in range(HIGHEST + 3):
        assert sketch.estimate(some).tolist() == [min(i, HIGHEST)] * 50
        sketch.add(some)


def test_a_sketch_never_says_too_little_and_seldom_too_much() -> None:
    sketch, many = FrequencySketch(2000), keys(2000, 1)
    true = np.random.default_rng(2).integers(0, 6, 2000)
    for count in range(1, 6):
        sketch.add(many[true >= count])
    estimates = sketch.estimate(many)
    assert (estimates >= true).all()
    assert (estimates > true).mean() < 0.05


def test_a_sketch_forgets_by_halves() -> None:
    sketch, some = FrequencySketch(100), keys(10)
    for _ in range(8):
        sketch.add(some)
    for i in range(SAMPLE * 100 // 50):
        sketch.add(keys(50, i + 1))
    assert sketch.num_counted < SAMPLE * 100
    assert set(sketch.estimate(some).tolist()) <= {4, 5}
