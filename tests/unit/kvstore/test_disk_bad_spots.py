"""A spot that a disk can't read costs the block that lies on it: not the others, and not compaction."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from distserve.errors import BlockDamaged, DiskFailed
from distserve_kvstore.disk.damage import MAX_FAILURES
from tests.unit.kvstore.stored_blocks import ALIGNED, chain, opened, records, served

RECORD = 4096 + 8192


@contextmanager
def bad_spot(monkeypatch: pytest.MonkeyPatch, segment: str, start: int, stop: int) -> Iterator[None]:
    """Reads of these bytes of that file fail. segment "": of all files."""
    real = os.preadv

    def read(fd, buffers, at):
        here = os.readlink(f"/proc/self/fd/{fd}").endswith(segment)
        if here and at < stop and start < at + sum(len(b) for b in buffers):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", read)
        yield


def record(n: int) -> tuple[str, int, int]:
    return "00000001.seg", 4096 + n * RECORD, 4096 + (n + 1) * RECORD


def fill(tier) -> dict[bytes, int]:
    """Three segments of 20 blocks."""
    hashes = chain("a", 60)
    return dict(zip(hashes, tier.append(records(hashes, ALIGNED)), strict=True))


def test_compaction_goes_round_a_bad_spot(tmp_path, monkeypatch):
    with opened(tmp_path) as (tier, _):
        there = fill(tier)
        hashes = list(there)
        tier.free([there.pop(h) for h in hashes[6:20]])
        with bad_spot(monkeypatch, *record(4)):
            while tier.compact(1 << 20).more:
                pass
            assert not (tmp_path / "00000001.seg").exists()
            assert tier.stats().num_damaged == 1
            errors = served(tier, list(there.values()), list(there), ALIGNED)
        assert [h for h, e in zip(there, errors, strict=True) if e is not None] == [hashes[4]]
        assert isinstance(errors[4], BlockDamaged)
        assert (tmp_path / "00000001.seg.damaged").exists()


def test_a_last_block_on_a_bad_spot_holds_up_no_compaction(tmp_path, monkeypatch):
    with opened(tmp_path) as (tier, _):
        there = fill(tier)
        hashes = list(there)
        tier.free([there[h] for h in hashes[:20] if h != hashes[4]])
        with bad_spot(monkeypatch, *record(4)):
            while tier.compact(1 << 20).more:
                pass
        assert not (tmp_path / "00000001.seg").exists()


def test_compaction_on_a_disk_that_reads_nothing_is_said_and_costs_nothing(tmp_path, monkeypatch):
    with opened(tmp_path) as (tier, _):
        there = fill(tier)
        tier.free([there.pop(h) for h in list(there)[6:20]])
        with bad_spot(monkeypatch, "", 0, 1 << 40):
            for _ in range(MAX_FAILURES + 1):
                with pytest.raises(DiskFailed):
                    tier.compact(1 << 20)
        assert tier.stats().num_damaged == 0
        assert not any(served(tier, list(there.values()), list(there), ALIGNED))
        while tier.compact(1 << 20).more:
            pass
        assert not (tmp_path / "00000001.seg").exists()


def test_a_block_that_fails_again_and_again_is_set_aside_so_that_it_stops_being_tried(tmp_path, monkeypatch):
    with opened(tmp_path) as (tier, _):
        there = fill(tier)
        bad = list(there)[4]
        with bad_spot(monkeypatch, *record(4)):
            said = [served(tier, [there[bad]], [bad], ALIGNED)[0] for _ in range(MAX_FAILURES)]
        assert [type(e) for e in said] == [DiskFailed] * (MAX_FAILURES - 1) + [BlockDamaged]
        assert "could not be read 3 times" in str(said[-1])
        errors = served(tier, list(there.values()), list(there), ALIGNED)
        assert [i for i, e in enumerate(errors) if e is not None] == [4]


def test_a_disk_that_reads_nothing_for_a_while_costs_no_block(tmp_path, monkeypatch):
    with opened(tmp_path) as (tier, _):
        there = fill(tier)
        with bad_spot(monkeypatch, "", 0, 1 << 40):
            for _ in range(MAX_FAILURES + 1):
                errors = served(tier, list(there.values()), list(there), ALIGNED)
                assert all(isinstance(e, DiskFailed) for e in errors)
        assert not any(served(tier, list(there.values()), list(there), ALIGNED))


def test_verify_counts_what_can_not_be_read_and_goes_on(tmp_path, monkeypatch):
    with opened(tmp_path) as (tier, _):
        fill(tier)
        with bad_spot(monkeypatch, *record(4)):
            assert tier.verify() == (59, 0, 1)
        assert tier.verify() == (60, 0, 0)
        with bad_spot(monkeypatch, "", 0, 1 << 40):
            assert tier.verify() == (0, 0, 60)
        assert tier.verify() == (60, 0, 0)
