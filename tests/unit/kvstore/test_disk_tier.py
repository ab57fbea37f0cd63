"""The disk tier: what it keeps, what it gives back, and to whom."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing

import numpy as np
import pytest

from distserve.errors import BlocksMissing, ConfigError, KVError
from distserve_kvstore.disk import DiskOptions, DiskTier, Record, open_files
from distserve_kvstore.disk.folder import FolderLock, read_layout
from tests.unit.kvstore.stored_blocks import ALIGNED, ODD, OPTIONS, OTHER, chain, opened, records, served


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("layout", [ALIGNED, ODD], ids=["aligned", "odd"])
def test_blocks_come_back_as_they_were_written_in_any_order(tmp_path, layout, direct_io):
    options = DiskOptions(8 << 20, 256 << 10, direct_io, min_free_fraction=0.0)
    hashes = chain("a", 60)
    with opened(tmp_path, layout, options) as (tier, there):
        assert there == {}
        places = tier.append(records(hashes, layout))
        assert served(tier, places, hashes, layout) == [None] * 60
        order = np.random.default_rng(1).permutation(60).tolist()
        assert not any(served(tier, [places[i] for i in order], [hashes[i] for i in order], layout))
        if direct_io == "off":
            assert not tier.stats().direct_io
    with opened(tmp_path, layout, options) as (tier, there):
        assert set(there) == set(hashes)
        assert served(tier, list(there.values()), list(there), layout) == [None] * 60


def test_payloads_that_lie_anywhere_in_memory_are_written_and_read(tmp_path):
    """Direct I/O wants aligned memory; nobody has to have it."""
    hashes = chain("a", 5)
    memory = np.zeros(5 * 8192 + 5 * 8, np.uint8)
    crooked = [memory[i * 8200 + 3 : i * 8200 + 3 + 8192] for i in range(5)]
    with opened(tmp_path) as (tier, _):
        for r, row in zip(records(hashes, ALIGNED), crooked, strict=True):
            row[:] = r.payload
        places = tier.append([Record(h, bytes(32), 0, "", "", row) for h, row in zip(hashes, crooked, strict=True)])
        assert not any(served(tier, places, hashes, ALIGNED))
        wanted = memory.copy()
        memory[:] = 0
        assert not any(tier.read(places, hashes, [row.data for row in crooked]))
        assert (memory == wanted).all()


def test_what_a_block_belongs_to_comes_back_as_runs_of_its_chain(tmp_path):
    a, b = chain("a", 10), chain("b", 4)
    with opened(tmp_path) as (tier, _):
        tier.append(records(a, ALIGNED, "tenant", "Gespräch ✓"))
        tier.append(records(b, ALIGNED, "", "", start=64))
        tier.append(records(chain("a", 12)[10:], ALIGNED, "tenant", "other", start=10))
    tier, runs = DiskTier.open(tmp_path, ALIGNED, OPTIONS)
    with closing(tier):
        said = [(r.hashes, r.parent, r.start, r.tenant, r.conversation, len(r.places)) for r in runs]
    tail = chain("a", 12)[10:]
    assert said == [
        (b"".join(a), bytes(32), 0, "tenant", "Gespräch ✓", 10),
        (b"".join(b), bytes(32), 64, "", "", 4),
        (b"".join(tail), bytes(32), 10, "tenant", "other", 2),
    ]


def test_several_blocks_are_one_write(tmp_path, monkeypatch):
    calls = []
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: calls.append(len(buffers)) or real(fd, buffers, at))
    with opened(tmp_path) as (tier, _):
        tier.append(records(chain("a", 1), ALIGNED))  # begins a segment
        calls.clear()
        tier.append(records(chain("b", 16), ALIGNED))
        assert calls == [32], "a header and a payload each, in one call"


def test_the_newer_of_two_records_of_one_block_is_the_one_that_counts(tmp_path):
    hashes = chain("a", 3)
    with opened(tmp_path) as (tier, _):
        tier.append(records(hashes, ALIGNED, conversation="old"))
        tier.append(records(hashes[:2], ALIGNED, conversation="new"))
    tier, runs = DiskTier.open(tmp_path, ALIGNED, OPTIONS)
    with closing(tier):
        assert sorted((r.conversation, len(r.places)) for r in runs) == [("new", 2), ("old", 1)]
        # Were the older ones only overlooked, they would come back when the newer are gone.
        tier.forget([p for r in runs if r.conversation == "new" for p in r.places])
    with opened(tmp_path) as (tier, there):
        assert list(there) == hashes[2:]


def test_a_place_that_is_anothers_now_serves_nobody_who_asks_for_the_block_before(tmp_path):
    a, b = chain("a", 4), chain("b", 4)
    with opened(tmp_path) as (tier, _):
        places = tier.append(records(a, ALIGNED))
        tier.free(places)
        assert all(isinstance(e, BlocksMissing) for e in served(tier, places, a, ALIGNED))
        again = tier.append(records(b, ALIGNED))
        assert set(again) == set(places), "places are used again, or the node's columns would grow for ever"
        assert all(isinstance(e, BlocksMissing) for e in served(tier, places, a, ALIGNED))
        assert not any(served(tier, again, b, ALIGNED))
        assert tier.stats().num_damaged == 0


def test_what_nobody_has_can_not_be_freed(tmp_path):
    with opened(tmp_path) as (tier, _):
        places = tier.append(records(chain("a", 3), ALIGNED))
        for wrong in ([places[0], places[0]], [99], [-1], [places[0], 99]):
            with pytest.raises(KVError, match="freed twice, or is nobody's"):
                tier.free(wrong)
        tier.free(places)
        with pytest.raises(KVError, match="freed twice"):
            tier.free(places[:1])
        assert tier.stats().num_blocks == 0


def test_what_can_not_be_a_record_is_refused_and_changes_nothing(tmp_path):
    (good,) = records(chain("a", 1), ALIGNED)
    with opened(tmp_path) as (tier, _):
        for wrong, says in (
            (Record(good.hash, good.parent, 0, "", "", memoryview(bytearray(100))), "100 bytes, must be 8192"),
            (Record(b"x", good.parent, 0, "", "", good.payload), "32 bytes each"),
            (Record(good.hash, good.parent, 0, "t" * 300, "", good.payload), "tenant of 300 bytes, at most 256"),
            (
                Record(good.hash, good.parent, 0, "", "ß" * 600, good.payload),
                "conversation of 1200 bytes, at most 1024",
            ),
        ):
            with pytest.raises(KVError, match=says):
                tier.append([good, wrong])
        with pytest.raises(KVError, match="buffer"):
            tier.read([0], [good.hash], [memoryview(bytearray(5))])
        assert tier.stats().num_blocks == 0


@pytest.mark.parametrize("layout", [ALIGNED, ODD], ids=["aligned", "odd"])
def test_places_stay_right_for_readers_while_compaction_moves_the_blocks(tmp_path, layout):
    names = [chain(f"{i}", 20) for i in range(12)]
    with opened(tmp_path, layout, DiskOptions(8 << 20, 128 << 10, min_free_fraction=0.0)) as (tier, _):
        kept, dropped = {}, []
        for hashes in names:
            places = tier.append(records(hashes, layout))
            kept.update(zip(hashes[::3], places[::3], strict=True))
            dropped += [p for i, p in enumerate(places) if i % 3]
        tier.free(dropped)
        stop, rounds, wrong = threading.Event(), [0, 0], []

        def read_on(number: int) -> None:
            hashes = list(kept)
            while not stop.is_set() or not rounds[number]:
                errors = served(tier, [kept[h] for h in hashes], hashes, layout)
                wrong.extend(e for e in errors if e is not None)
                rounds[number] += 1

        readers = [threading.Thread(target=read_on, args=(n,)) for n in range(2)]
        for reader in readers:
            reader.start()
        reports = [tier.compact(1)]
        while reports[-1].more:
            reports.append(tier.compact(1))
        stop.set()
        for reader in readers:
            reader.join(60)
        assert not any(reader.is_alive() for reader in readers)
        assert wrong == []
        assert len(reports) > 20, "a small budget is a small slice"
        assert all(r.num_moved <= 1 for r in reports)
        assert sum(r.num_moved for r in reports) > 20
        assert sum(r.freed_bytes for r in reports) >= 3 * (128 << 10)
        assert not any(served(tier, list(kept.values()), list(kept), layout))


def test_small_segments_that_restarts_leave_are_put_together(tmp_path):
    for i in range(6):
        with opened(tmp_path) as (tier, _):
            tier.append(records(chain(f"{i}", 3), ALIGNED))
    with opened(tmp_path) as (tier, there):
        assert tier.stats().num_segments == 6
        while tier.compact(1 << 20).more:
            pass
        assert tier.stats().num_segments <= 2
        assert len(there) == 18
        assert not any(served(tier, list(there.values()), list(there), ALIGNED))


def test_the_bytes_of_forgotten_blocks_leave_the_disk_with_the_next_compaction(tmp_path):
    hashes = chain("secret", 10)
    (needle, *_) = [bytes(r.payload[:64]) for r in records(hashes, ALIGNED)]
    with opened(tmp_path) as (tier, _):
        tier.append(records(chain("a", 10), ALIGNED))
        places = tier.append(records(hashes, ALIGNED))

        def on_disk() -> bool:
            return any(needle in path.read_bytes() for path in tmp_path.iterdir())

        assert on_disk()
        tier.forget(places)
        while tier.compact(1 << 20).more:
            pass
        assert not on_disk()
        assert tier.stats().num_blocks == 10


def test_the_list_of_the_dead_does_not_grow_for_ever(tmp_path):
    with opened(tmp_path) as (tier, _):
        for i in range(400):
            tier.free(tier.append(records(chain(f"{i}", 15), ALIGNED)))
            tier.compact(1 << 20)
        assert os.path.getsize(tmp_path / "dead.log") < 16 * 5000
        places = tier.append(records(chain("left", 5), ALIGNED))
    with opened(tmp_path) as (tier, there):
        assert set(there) == set(chain("left", 5))
        assert len(places) == 5


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_slow_disk_holds_up_only_who_uses_it(tmp_path, monkeypatch, call):
    a, b = chain("a", 4), chain("b", 4)
    real, gate, waiting = getattr(os, call), threading.Event(), threading.Event()
    with opened(tmp_path) as (tier, _):
        places = tier.append(records(a, ALIGNED))
        slow = threading.Thread(
            target=lambda: served(tier, places, a, ALIGNED) if call == "preadv" else tier.append(records(b, ALIGNED))
        )

        def hang(fd, buffers, at):
            if threading.current_thread() is slow:
                waiting.set()
                assert gate.wait(30)
            return real(fd, buffers, at)

        monkeypatch.setattr(os, call, hang)
        slow.start()
        assert waiting.wait(10)
        began = time.monotonic()
        assert tier.stats().num_blocks == 4
        assert not any(served(tier, places[:2], a[:2], ALIGNED))
        if call == "preadv":
            more = tier.append(records(b, ALIGNED))
            tier.free(more)
            tier.forget(places[2:])
            tier.compact(1 << 20)
        else:
            tier.free(places[2:])
        assert time.monotonic() - began < 10
        assert slow.is_alive()
        gate.set()
        slow.join(10)
        assert not slow.is_alive()


def test_a_second_node_is_refused_by_the_name_of_the_first_until_that_is_dead(tmp_path):
    code = f"""
import sys
from pathlib import Path
from distserve_kvstore.disk import DiskOptions, DiskTier
from tests.unit.kvstore.stored_blocks import ALIGNED
tier, _ = DiskTier.open(Path({str(tmp_path)!r}), ALIGNED, DiskOptions(node="kv-first"))
print("open", flush=True)
sys.stdin.read()
"""
    first = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=rf"in use by node kv-first \(pid {first.pid}\)") as refused:
            DiskTier.open(tmp_path, ALIGNED, OPTIONS)
        assert refused.value.key == "kvstore.folder"
        assert read_layout(tmp_path) == ALIGNED, "who may not open it may know what is in it"
    finally:
        first.kill()
        first.wait(10)
        for pipe in (first.stdin, first.stdout):
            pipe.close()
    with opened(tmp_path) as (tier, _):
        assert tier.append(records(chain("a", 1), ALIGNED))


def test_a_folder_is_free_again_when_opening_it_failed(tmp_path):
    with pytest.raises(ConfigError, match=r"kvstore.disk_bytes is 10000, must be at least"):
        DiskTier.open(tmp_path, ALIGNED, DiskOptions(capacity_bytes=10_000))
    FolderLock(tmp_path, "kv-b").close()


def test_a_folder_says_what_its_blocks_are(tmp_path):
    assert DiskTier.layout_of(tmp_path / "none") is None
    with opened(tmp_path, ODD) as (tier, _):
        tier.append(records(chain("a", 1), ODD))
    assert DiskTier.layout_of(tmp_path) == ODD
    manifest = tmp_path / "manifest.json"
    for text in ("", "{", json.dumps({"format": 1}), manifest.read_text().replace('"o"', '"p"')):
        manifest.write_text(text)
        assert DiskTier.layout_of(tmp_path) == ODD, "segments say it too"
    manifest.unlink()
    assert DiskTier.layout_of(tmp_path) == ODD


def test_a_closed_tier_takes_nothing_and_closing_twice_is_nothing(tmp_path):
    with opened(tmp_path) as (tier, _):
        pass
    tier.close()
    for call in (lambda: tier.append(records(chain("a", 1), ALIGNED)), lambda: tier.compact(1), tier.flush):
        with pytest.raises(KVError, match="closed"):
            call()


def test_more_segments_than_a_process_may_open_are_served(tmp_path, monkeypatch):
    monkeypatch.setattr(open_files, "MAX_OPEN", 3)
    hashes = chain("a", 60)
    with opened(tmp_path, ALIGNED, DiskOptions(8 << 20, 64 << 10, min_free_fraction=0.0)) as (tier, _):
        before = len(os.listdir("/proc/self/fd"))
        places = tier.append(records(hashes, ALIGNED))
        assert tier.stats().num_segments > 12
        for _ in range(2):
            assert not any(served(tier, places, hashes, ALIGNED))
        assert len(os.listdir("/proc/self/fd")) - before <= 4


def test_threads_append_read_and_free_at_once(tmp_path):
    failures = []

    with opened(tmp_path, ODD, DiskOptions(32 << 20, 256 << 10, min_free_fraction=0.0)) as (tier, _):

        def work(number: int) -> None:
            try:
                mine: dict[bytes, int] = {}
                for i in range(25):
                    hashes = chain(f"{number}.{i}", 12)
                    mine.update(zip(hashes, tier.append(records(hashes, ODD)), strict=True))
                    assert not any(served(tier, list(mine.values()), list(mine), ODD))
                    for h in list(itertools.islice(mine, 6)):
                        tier.free([mine.pop(h)])
                    tier.compact(100_000)
                assert tier.stats().num_damaged == 0
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
        assert tier.stats().num_blocks == 4 * 25 * 6


def test_verify_reads_everything(tmp_path):
    with opened(tmp_path) as (tier, _):
        places = tier.append(records(chain("a", 50), ALIGNED))
        tier.free(places[10:20])
        assert tier.verify() == (40, 0, 0)


def test_flush_is_one_sync_for_many_appends(tmp_path, monkeypatch):
    calls = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: calls.append(fd) or real(fd))
    with opened(tmp_path) as (tier, _):
        tier.append(records(chain("x", 1), ALIGNED))
        calls.clear()
        for i in range(10):
            tier.append(records(chain(f"{i}", 1), ALIGNED))
        assert calls == []
        tier.flush()
        assert len(calls) == 2, "the segment and the list of the dead"


def test_the_copy_of_a_running_folder_is_a_folder(tmp_path):
    """What a backup, or a snapshot, takes."""
    hashes = chain("a", 30)
    with opened(tmp_path / "kv") as (tier, _):
        tier.append(records(hashes, ALIGNED))
        shutil.copytree(tmp_path / "kv", tmp_path / "copy")
    with opened(tmp_path / "copy") as (tier, there):
        assert set(there) == set(hashes)
        assert not any(served(tier, list(there.values()), list(there), ALIGNED))


def test_another_layout_in_the_same_folder_starts_empty_and_leaves_the_other_for_people(tmp_path, caplog):
    with opened(tmp_path) as (tier, _):
        tier.append(records(chain("a", 5), ALIGNED))
    with opened(tmp_path, OTHER) as (tier, there):
        assert there == {}
        assert tier.stats().num_set_aside == 1
        tier.append(records(chain("b", 5), OTHER))
    assert "(weights a), not" in caplog.text
    assert "(weights x)" in caplog.text
    assert [p.name for p in tmp_path.glob("*.foreign")] == ["00000001.seg.foreign"]
    with opened(tmp_path, OTHER) as (_, there):
        assert set(there) == set(chain("b", 5))
