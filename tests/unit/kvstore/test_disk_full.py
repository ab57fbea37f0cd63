"""A disk without room, and one that refuses: said by type, the rest goes on, and all is well once there is room."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from distserve.errors import DiskFailed, DiskFull
from distserve_kvstore.disk import DiskOptions, DiskTier
from tests.unit.kvstore.stored_blocks import ALIGNED, ODD, OPTIONS, SEGMENT_BYTES, chain, opened, records, served


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"can't mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(tier: DiskTier) -> tuple[dict[bytes, int], DiskFull]:
    """Append until it is full: what is there, and how it said so."""
    there: dict[bytes, int] = {}
    for i in range(1000):
        hashes = chain(f"fill {i}", 7)
        try:
            there.update(zip(hashes, tier.append(records(hashes, ALIGNED)), strict=True))
        except DiskFull as e:
            return there, e
    raise AssertionError("it took more than it can hold")


def use(tier: DiskTier, there: dict[bytes, int]) -> None:
    """Full: read all; free a half; compact; append again; nothing is lost."""
    assert not any(served(tier, list(there.values()), list(there), ALIGNED))
    tier.check()
    assert tier.stats().num_blocks == len(there)
    tier.free([there.pop(h) for h in list(there)[::2]])
    while tier.compact(1 << 20).more:
        pass
    more = chain("again", 14)
    there.update(zip(more, tier.append(records(more, ALIGNED)), strict=True))
    assert not any(served(tier, list(there.values()), list(there), ALIGNED))


@pytest.mark.parametrize("min_free", [0.0, 0.2], ids=["to the last byte", "a fifth stays free"])
def test_a_full_file_system_is_said_and_left_usable(small_disk, min_free):
    options = DiskOptions(0, SEGMENT_BYTES, min_free_fraction=min_free)
    with opened(small_disk, ALIGNED, options) as (tier, _):
        there, full = fill(tier)
        assert full.reason == "reserve"
        assert full.folder == str(small_disk)
        assert full.http_status == 503
        assert tier.stats().num_blocks >= tier.stats().usable_blocks > 40
        now = os.statvfs(small_disk)
        assert now.f_bavail >= min_free * now.f_blocks
        use(tier, there)
    with opened(small_disk, ALIGNED, options) as (tier, found):
        assert set(found) == set(there)


def test_room_that_others_take_is_missed_only_by_new_blocks(small_disk):
    """Nothing at all is left: no block, no list, no lock can grow."""
    options = DiskOptions(0, SEGMENT_BYTES, min_free_fraction=0.0)
    with opened(small_disk, ALIGNED, options) as (tier, _):
        hashes = chain("a", 40)
        there = dict(zip(hashes, tier.append(records(hashes, ALIGNED)), strict=True))
        left = os.statvfs(small_disk)
        with (small_disk / "others").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize)
        there.update(fill(tier)[0])
        assert not any(served(tier, [there[h] for h in hashes], hashes, ALIGNED))
        tier.free([there.pop(h) for h in hashes[:5]])
        tier.forget([there.pop(h) for h in hashes[5:10]])
    with opened(small_disk, ALIGNED, options) as (tier, found):
        assert not set(found) & set(hashes[:10])
        assert set(found) >= set(there)
        (small_disk / "others").unlink()
        assert tier.append(records(chain("b", 10), ALIGNED))


def test_the_capacity_is_kept_and_a_full_tier_is_left_usable(tmp_path):
    with opened(tmp_path) as (tier, _):
        there, full = fill(tier)
        assert full.reason == "capacity"
        assert "8388608 (kvstore.disk_bytes)" in str(full)
        assert tier.stats().file_bytes <= OPTIONS.capacity_bytes
        assert tier.stats().num_blocks >= tier.stats().usable_blocks
        use(tier, there)
        assert tier.stats().file_bytes <= OPTIONS.capacity_bytes


def test_a_tier_kept_at_what_it_says_is_usable_never_runs_out_of_room(tmp_path):
    """The worst case for compaction: victims are anywhere."""
    with opened(tmp_path) as (tier, _):
        there: dict[bytes, int] = {}
        for i in range(150):
            excess = len(there) + 10 - tier.stats().usable_blocks
            hashes = list(there)
            tier.free([there.pop(h) for h in hashes[i % 7 :: 7][: max(0, excess)]])
            excess = len(there) + 10 - tier.stats().usable_blocks
            tier.free([there.pop(h) for h in list(there)[: max(0, excess)]])
            while tier.compact(1 << 20).more:
                pass
            new = chain(f"{i}", 10)
            there.update(zip(new, tier.append(records(new, ALIGNED)), strict=True))
        assert len(there) == tier.stats().usable_blocks
        assert not any(served(tier, list(there.values()), list(there), ALIGNED))


@pytest.mark.parametrize("layout", [ALIGNED, ODD], ids=["aligned", "odd"])
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, DiskFailed)]
)
def test_a_write_that_fails_half_way_leaves_nothing_and_the_next_one_works(tmp_path, monkeypatch, layout, number, kind):
    before, torn, after = chain("before", 5), chain("torn", 9), chain("after", 5)
    real = os.pwritev
    with opened(tmp_path, layout) as (tier, _):
        there = dict(zip(before, tier.append(records(before, layout)), strict=True))

        def half(fd, buffers, at):
            real(fd, [buffers[0][: 4 * 4096], *buffers[1:7]], at)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pwritev", half)
        with pytest.raises(kind) as failed:
            tier.append(records(torn, layout))
        if kind is DiskFailed:
            assert (failed.value.operation, failed.value.errno) == ("write", errno.EIO)
            assert failed.value.path.endswith(".seg")
        monkeypatch.setattr(os, "pwritev", real)
        assert not any(served(tier, list(there.values()), list(there), layout))
        there.update(zip(after, tier.append(records(after, layout)), strict=True))
        assert not any(served(tier, list(there.values()), list(there), layout))
    with opened(tmp_path, layout) as (_, found):
        assert set(found) == set(there), "what failed does not turn up later"


def test_a_sync_that_fails_is_said_and_that_segment_is_written_no_more(tmp_path, monkeypatch):
    a, b = chain("a", 5), chain("b", 5)
    real = os.fdatasync
    with opened(tmp_path, ALIGNED, DiskOptions(8 << 20, SEGMENT_BYTES, sync_bytes=1, min_free_fraction=0)) as (tier, _):
        there = dict(zip(a, tier.append(records(a, ALIGNED)), strict=True))

        def fail(fd):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(DiskFailed, match=r"can't sync .*00000001.seg: Input/output error"):
            tier.append(records(b, ALIGNED))
        with pytest.raises(DiskFailed):
            tier.forget([there[a[0]]])
        monkeypatch.setattr(os, "fdatasync", real)
        places = tier.append(records(b, ALIGNED))
        assert there[a[0]] not in places, "a place is nobody else's until its block is forgotten for good"
        tier.forget([there.pop(a[0])])
        assert sorted(p.name for p in tmp_path.glob("*.seg")) == ["00000001.seg", "00000002.seg"]
        assert not any(served(tier, [*there.values(), *places], [*there, *b], ALIGNED))
    with opened(tmp_path) as (_, found):
        assert set(found) == {*there, *b}


def test_a_bad_spot_on_the_disk_costs_the_block_that_lies_on_it(tmp_path, monkeypatch):
    hashes = chain("a", 12)
    real = os.preadv
    with opened(tmp_path) as (tier, _):
        places = tier.append(records(hashes, ALIGNED))
        bad = range(4096 + 4 * 12288, 4096 + 5 * 12288)

        def spot(fd, buffers, at):
            if at < bad.stop and bad.start < at + sum(len(b) for b in buffers):
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, buffers, at)

        monkeypatch.setattr(os, "preadv", spot)
        errors = served(tier, places, hashes, ALIGNED)
        assert [i for i, e in enumerate(errors) if e is not None] == [4]
        assert isinstance(errors[4], DiskFailed)
        monkeypatch.setattr(os, "preadv", real)
        assert not any(served(tier, places, hashes, ALIGNED)), "it may work again"


def test_where_the_file_system_can_not_promise_space_nor_direct_io_it_works_without(tmp_path, monkeypatch):
    real = os.open

    def refuse(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    def cached_only(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(os, "open", cached_only)
    hashes = chain("a", 45)
    with opened(tmp_path) as (tier, _):
        assert not tier.stats().direct_io
        assert not any(served(tier, tier.append(records(hashes, ALIGNED)), hashes, ALIGNED))
    with opened(tmp_path) as (tier, there):
        assert not any(served(tier, list(there.values()), list(there), ALIGNED))
        assert len(there) == 45


def test_a_folder_that_can_not_be_had_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFailed, match="can't open"):
        DiskTier.open(tmp_path / "file" / "kv", ALIGNED, OPTIONS)
