"""Files that are not served take room only while blocks need none; what can't be read once is there the next time."""

import errno
import os
from pathlib import Path

from tests.unit.kvstore.stored_blocks import ALIGNED, OPTIONS, OTHER, chain, opened, records, served
from tests.unit.kvstore.test_disk_full import fill


def foreign(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.foreign"))


def test_another_layouts_files_make_room_oldest_first(tmp_path):
    with opened(tmp_path) as (tier, _):
        fill(tier)
    with opened(tmp_path, OTHER) as (tier, _):
        before = foreign(tmp_path)
        assert len(before) > 20
        num = tier.stats().usable_blocks
        hashes = chain("b", num // 2)
        tier.append(records(hashes, OTHER))
        left = foreign(tmp_path)
        assert left, "no more go than must"
        assert left == before[-len(left) :]
        assert tier.stats().num_set_aside == len(left)
        num_bytes = sum(p.stat().st_size for p in tmp_path.glob("*.seg*"))
        assert num_bytes <= OPTIONS.capacity_bytes
        there, _ = fill(tier)
        assert foreign(tmp_path) == []
        assert len(there) + len(hashes) >= num, "they take no room from blocks"


def test_a_segment_that_can_not_be_read_at_an_opening_is_there_at_the_next(tmp_path, monkeypatch):
    hashes = chain("a", 60)
    with opened(tmp_path) as (tier, _):
        there = dict(zip(hashes, tier.append(records(hashes, ALIGNED)), strict=True))
        tier.forget([there[h] for h in hashes[25:30]])
    real = os.preadv

    def read(fd, buffers, at):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("00000002.seg"):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, at)

    more = chain("more", 30)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", read)
        with opened(tmp_path) as (tier, found):
            assert set(found) == {*hashes[:20], *hashes[40:]}
            places = tier.append(records(more, ALIGNED))
            tier.forget(places[:20])
            while tier.compact(1 << 20).more:
                pass
    assert list(tmp_path.glob("*.seg.*")) == []
    with opened(tmp_path) as (tier, found):
        assert set(found) == {*hashes[:25], *hashes[30:], *more[20:]}, "what was deleted before is still deleted"
        assert not any(served(tier, list(found.values()), list(found), ALIGNED))
