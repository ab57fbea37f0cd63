"""The disk tier against a dictionary, over random lives: what is in it, what is served, what comes back."""

import random
import shutil
from pathlib import Path

import pytest

from distserve.errors import DiskFull
from distserve.messages import KVLayout
from distserve_kvstore.disk import DiskTier
from tests.unit.kvstore.stored_blocks import ALIGNED, ODD, OPTIONS, chain, found, records, served


class Life:
    """One tier, its dictionary (hash -> place), and what was forgotten for good."""

    def __init__(self, folder: Path, layout: KVLayout, seed: int) -> None:
        self.layout = layout
        self.random = random.Random(seed)
        self.folder = folder
        self.tier, runs = DiskTier.open(folder, layout, OPTIONS)
        assert not runs
        self.places: dict[bytes, int] = {}
        self.gone: set[bytes] = set()  # freed or forgotten, and not written again
        self.num_chains = self.num_full = 0

    def append(self) -> None:
        if self.gone and self.random.random() < 0.3:
            hashes = self.random.sample(sorted(self.gone), min(len(self.gone), 5))
        else:
            self.num_chains += 1
            hashes = chain(f"{self.num_chains}", self.random.randint(1, 150))
        try:
            places = self.tier.append(records(hashes, self.layout))
        except DiskFull:
            self.num_full += 1
            self.free(len(self.places) // 2)
            self.compact()
            return
        assert not set(places) & set(self.places.values())
        self.places.update(zip(hashes, places, strict=True))
        self.gone -= set(hashes)

    def free(self, n: int, *, forget: bool = False) -> None:
        hashes = self.random.sample(sorted(self.places), min(n, len(self.places)))
        places = [self.places.pop(h) for h in hashes]
        (self.tier.forget if forget else self.tier.free)(places)
        self.gone |= set(hashes)

    def compact(self) -> None:
        self.tier.compact(self.random.choice([1, 100_000, 1 << 20, 1 << 24]))

    def crash(self) -> None:
        """As a killed process leaves the folder: nothing is closed, nothing sealed."""
        crashed = self.folder.with_name(f"{self.folder.name}'")
        shutil.copytree(self.folder, crashed)
        self.tier.close()
        self._reopen(crashed)

    def restart(self) -> None:
        self.tier.close()
        self._reopen(self.folder)

    def _reopen(self, folder: Path) -> None:
        self.folder = folder
        self.tier, runs = DiskTier.open(folder, self.layout, OPTIONS)
        there = found(runs)
        assert set(there) == set(self.places)
        self.places = there

    def look(self) -> None:
        self.tier.check()
        hashes = list(self.places)
        errors = served(self.tier, [self.places[h] for h in hashes], hashes, self.layout)
        assert errors == [None] * len(hashes)
        stats = self.tier.stats()
        assert stats.num_blocks == len(hashes)
        assert stats.file_bytes <= OPTIONS.capacity_bytes + OPTIONS.segment_bytes
        assert stats.num_damaged == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", [ALIGNED, ODD], ids=["aligned", "odd"])
def test_what_was_written_and_not_freed_is_there_through_any_life(tmp_path, layout, seed):
    life = Life(tmp_path / "kv", layout, seed)
    for _ in range(80):
        step = life.random.choice("aaaaffFccxrl")
        if step == "a":
            life.append()
        elif step in "fF":
            life.free(life.random.randint(1, 30), forget=step == "F")
        elif step == "c":
            life.compact()
        elif step == "x":
            life.crash()
        elif step == "r":
            life.restart()
        else:
            life.look()
    life.look()
    while life.tier.compact(1 << 20).more:
        pass
    life.look()
    assert life.num_full, "it has to be short of room now and then"
    life.tier.close()
