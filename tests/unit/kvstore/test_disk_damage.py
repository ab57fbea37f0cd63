"""Files that are not what was written: what is found is set aside, and nothing wrong is ever served."""

import random
from pathlib import Path

import pytest

from distserve.errors import BlockDamaged
from distserve_kvstore.disk.set_aside import MAX_DAMAGED
from tests.unit.kvstore.stored_blocks import ALIGNED, OPTIONS, chain, opened, records, served

NUM = 60  # blocks: three segments of 20


def fill(folder: Path, name: str = "a") -> list[bytes]:
    hashes = chain(name, NUM)
    with opened(folder) as (tier, _):
        for i in range(0, NUM, 10):
            tier.append(records(hashes, ALIGNED)[i : i + 10])
    return hashes


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def look(folder: Path, hashes: list[bytes]) -> tuple[int, int]:
    """(blocks served right, blocks found damaged when read); wrong ones fail."""
    with opened(folder) as (tier, there):
        assert set(there) <= set(hashes)
        errors = served(tier, list(there.values()), list(there), ALIGNED)
        assert all(e is None or isinstance(e, BlockDamaged) for e in errors)
        num_damaged = len(errors) - errors.count(None)
        assert tier.stats().num_damaged == num_damaged
        assert served(tier, list(there.values()), list(there), ALIGNED).count(None) == errors.count(None)
        return errors.count(None), num_damaged


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_costs_what_it_hits_and_is_never_served(tmp_path, seed):
    rng = random.Random(seed)
    hashes = fill(tmp_path)
    path = rng.choice(segments(tmp_path))
    flip(path, rng.randrange(path.stat().st_size), rng.randrange(8))
    right, damaged = look(tmp_path, hashes)
    assert damaged <= 1
    # A segment's header costs the segment; its index, and bytes that only fill up, cost nothing.
    assert right + damaged in (NUM, NUM - 20)
    if right + damaged < NUM:
        assert len(list(tmp_path.glob("*.damaged")) + list(tmp_path.glob("*.foreign"))) == 1
    assert look(tmp_path, hashes) == (right, 0), "what was found is not there the next time"


@pytest.mark.parametrize("seed", range(10))
def test_many_flipped_bits_at_once(tmp_path, seed):
    rng = random.Random(seed)
    hashes = fill(tmp_path)
    for _ in range(30):
        path = rng.choice(segments(tmp_path))
        flip(path, rng.randrange(path.stat().st_size), rng.randrange(8))
    right, damaged = look(tmp_path, hashes)
    assert right > 0 or len(list(tmp_path.glob("*.seg.*"))) > 0
    assert damaged > 0 or len(list(tmp_path.glob("*.seg.*"))) > 0


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_off_file_costs_what_is_missing(tmp_path, seed):
    rng = random.Random(seed)
    hashes = fill(tmp_path)
    path = rng.choice(segments(tmp_path))
    left = rng.choice([0, 1, 4095, 4096, rng.randrange(path.stat().st_size)])
    with path.open("r+b") as file:
        file.truncate(left)
    right, damaged = look(tmp_path, hashes)
    assert damaged == 0, "what is not there is not found at all"
    if left < 4096:
        assert right == NUM - 20
        assert [p.name for p in tmp_path.glob("*.damaged")] == [path.name + ".damaged"]
    else:
        assert right == NUM - 20 + min(20, (left - 4096) // (4096 + 8192))


def test_a_damaged_block_is_said_set_aside_and_its_segment_kept_for_people(tmp_path, caplog):
    hashes = fill(tmp_path)
    path = segments(tmp_path)[1]
    flip(path, 4096 + 5 * (4096 + 8192) + 4096 + 100)
    with opened(tmp_path) as (tier, there):
        (bad,) = [e for e in served(tier, list(there.values()), list(there), ALIGNED) if e is not None]
        assert (bad.where, bad.reason) == (f"{path.name}, record 5", "its checksum is wrong")
        assert f"damaged and set aside ({path.name}, record 5" in caplog.text
        victim = hashes[25]
        again = served(tier, [there[victim]], [victim], ALIGNED)
        assert isinstance(again[0], BlockDamaged)
        tier.free([there.pop(victim)])
        while tier.compact(1 << 20).more:
            pass
        assert [p.name for p in tmp_path.glob("*.damaged")] == [path.name + ".damaged"]
        assert served(tier, list(there.values()), list(there), ALIGNED) == [None] * (NUM - 1)
        assert tier.stats().num_set_aside == 1
        tier.forget([there.pop(hashes[-1])])
        assert list(tmp_path.glob("*.damaged")) == [], "it may hold what was to be forgotten"
    with opened(tmp_path) as (_, there):
        assert set(there) == set(hashes) - {victim, hashes[-1]}


def test_compaction_moves_nothing_that_is_damaged(tmp_path):
    hashes = fill(tmp_path)
    flip(segments(tmp_path)[0], 4096 + 3 * (4096 + 8192) + 4096 + 8191)
    with opened(tmp_path) as (tier, there):
        tier.free([there.pop(h) for h in hashes[5:20]])
        while tier.compact(1 << 20).more:
            pass
        assert tier.stats().num_damaged == 1
        errors = served(tier, list(there.values()), list(there), ALIGNED)
        assert [h for h, e in zip(there, errors, strict=True) if e is not None] == [hashes[3]]


def test_verify_counts_and_sets_aside_what_is_damaged(tmp_path):
    hashes = fill(tmp_path)
    for segment, record in ((0, 3), (0, 4), (2, 19)):
        flip(segments(tmp_path)[segment], 4096 + record * (4096 + 8192) + 4096)
    with opened(tmp_path) as (tier, there):
        assert tier.verify() == (NUM - 3, 3, 0)
        assert tier.verify() == (NUM - 3, 0, 0)
        errors = served(tier, list(there.values()), list(there), ALIGNED)
        bad = {h for h, e in zip(there, errors, strict=True) if isinstance(e, BlockDamaged)}
        assert bad == {hashes[3], hashes[4], hashes[59]}


def test_a_record_in_the_place_of_another_is_not_served(tmp_path):
    """As when a disk writes to where it should not: both records are whole."""
    hashes = fill(tmp_path)
    path, size = segments(tmp_path)[0], 4096 + 8192
    raw = bytearray(path.read_bytes())
    raw[4096 : 4096 + size] = raw[4096 + size : 4096 + 2 * size]
    path.write_bytes(raw)
    with opened(tmp_path) as (tier, there):
        errors = served(tier, list(there.values()), list(there), ALIGNED)
        (bad,) = [(h, e) for h, e in zip(there, errors, strict=True) if e is not None]
        assert bad[0] == hashes[0]
        assert "record 2 lies there, not 1" in bad[1].reason


@pytest.mark.parametrize(
    "content",
    [b"", b"not a segment", bytes(8192), b"DSKVSEGM" + bytes(9000), b"\xff" * 100_000],
    ids=["empty", "text", "zeros", "a segment's magic", "noise"],
)
def test_files_of_other_kinds_are_set_aside_and_the_rest_is_served(tmp_path, content):
    hashes = fill(tmp_path)
    (tmp_path / "00000099.seg").write_bytes(content)
    assert look(tmp_path, hashes) == (NUM, 0)
    assert len(list(tmp_path.glob("00000099.seg.*"))) == 1
    with opened(tmp_path) as (tier, _):
        tier.append(records(chain("more", 1), ALIGNED))
    assert segments(tmp_path)[-1].name == "00000100.seg", "a number is never used again"


def test_only_the_newest_damaged_files_are_kept(tmp_path):
    for i in range(MAX_DAMAGED + 3):
        with opened(tmp_path) as (tier, _):
            tier.append(records(chain(f"{i}", 2), ALIGNED))
        flip(segments(tmp_path)[-1], 4096 + 4096 + 5)
        with opened(tmp_path) as (tier, there):
            tier.verify()
            tier.free(list(there.values()))
            while tier.compact(1 << 20).more:
                pass
    assert len(list(tmp_path.glob("*.damaged"))) == MAX_DAMAGED


def test_a_damaged_list_of_the_dead_is_said(tmp_path, caplog):
    hashes = fill(tmp_path)
    with opened(tmp_path) as (tier, there):
        tier.forget([there[h] for h in hashes[:10]])
    flip(tmp_path / "dead.log", 16 * 3)
    with opened(tmp_path) as (_, there):
        assert len(there) == NUM - 10 + 1
    assert "1 entries of the list of freed blocks are damaged" in caplog.text


def test_a_torn_end_of_the_list_of_the_dead_is_nothing(tmp_path, caplog):
    hashes = fill(tmp_path)
    with opened(tmp_path) as (tier, there):
        tier.forget([there[h] for h in hashes[:10]])
    with (tmp_path / "dead.log").open("ab") as file:
        file.write(b"\x01\x02\x03")
    with opened(tmp_path) as (_, there):
        assert set(there) == set(hashes[10:])
    assert "damaged" not in caplog.text


def test_a_torn_tail_is_dropped_and_what_stands_before_it_is_served(tmp_path, caplog):
    """As a machine that lost power leaves it: the last writes in part, and not in order."""
    hashes = chain("a", 15)
    with opened(tmp_path / "kv") as (tier, _):
        tier.append(records(hashes, ALIGNED))
        raw = bytearray((tmp_path / "kv" / "00000001.seg").read_bytes())
    size = 4096 + 8192
    raw[4096 + 14 * size + 9000 :] = bytes(len(raw) - (4096 + 14 * size + 9000))  # the last one's end
    raw[4096 + 12 * size : 4096 + 12 * size + 4096] = bytes(4096)  # a header that never came, before one that did
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    (crashed / "00000001.seg").write_bytes(raw)
    with opened(crashed) as (tier, there):
        assert set(there) == set(hashes) - {hashes[14], hashes[12]}
        assert not any(served(tier, list(there.values()), list(there), ALIGNED))
    assert "1 blocks that were being written" in caplog.text
    assert (crashed / "00000001.seg").stat().st_size < OPTIONS.segment_bytes, "cut, and given its index"
    with opened(crashed) as (_, there):
        assert len(there) == 13
