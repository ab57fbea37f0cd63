"""A folder without a node: looked at, checked, made smaller."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distserve.errors import ConfigError
from distserve.kv.layout import fingerprint
from distserve.kv_commands import kv_app
from distserve_kvstore import offline
from distserve_kvstore.disk.format import ALIGN, HEADER_BYTES, Shape
from tests.unit.kvstore.stored_blocks import ALIGNED, OPTIONS, chain, opened, records, served
from tests.unit.kvstore.test_disk_damage import flip

OLD, SHARED, NEW = chain("old", 10), chain("shared", 25), chain("new", 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three conversations: one old; one whose first 10 blocks another, newer one goes on from."""
    folder = tmp_path / "kv"
    with opened(folder) as (tier, _):
        tier.append(records(OLD, ALIGNED, "t1", "old"))
        tier.append(records(SHARED, ALIGNED, "t1", "first"))
        branch = records(NEW, ALIGNED, "t1", "second", start=10)
        branch[0] = type(branch[0])(NEW[0], SHARED[9], 10, "t1", "second", branch[0].payload)
        tier.append(branch)
    return folder


def test_stat_and_ls_say_what_is_there_and_change_nothing(folder):
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lock"}
    stats = offline.stat(folder)
    assert (stats.layout, stats.fingerprint, stats.block_bytes) == (ALIGNED, fingerprint(ALIGNED), 8192)
    assert (stats.num_blocks, stats.num_bytes) == (43, 43 * 8192)
    assert (stats.num_segments, stats.num_conversations, stats.num_set_aside) == (3, 3, 0)
    assert stats.file_bytes == sum(len(raw) for name, raw in before.items() if name.endswith(".seg"))
    assert [(c.tenant, c.conversation, c.num_blocks, c.num_bytes) for c in offline.ls(folder)] == [
        ("t1", "first", 25, 25 * 8192),
        ("t1", "old", 10, 10 * 8192),
        ("t1", "second", 8, 8 * 8192),
    ]
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lock"} == before


def test_looking_at_what_a_crash_left_changes_nothing_either(folder):
    with opened(folder) as (tier, _):
        tier.append(records(chain("more", 3), ALIGNED, "t2", "more"))
        shutil.copytree(folder, crashed := folder.with_name("crashed"))
    (crashed / "00000099.seg").write_bytes(b"what is this")
    before = {p.name: p.read_bytes() for p in crashed.iterdir() if p.name != "lock"}
    assert offline.stat(crashed).num_blocks == 46
    assert offline.ls(crashed)[-1].conversation == "more"
    assert {p.name: p.read_bytes() for p in crashed.iterdir() if p.name != "lock"} == before


def test_what_a_crash_of_the_machine_tore_is_counted_as_an_opening_counts_it(folder, monkeypatch):
    """Torn further before the end than what is synced at once: one write more may have been under way."""
    monkeypatch.setattr(offline, "_OPTIONS", replace(offline._OPTIONS, sync_bytes=ALIGN))
    hashes = chain("more", 15)
    with opened(folder) as (tier, _):
        tier.append(records(hashes, ALIGNED, "t2", "more"))
        shutil.copytree(folder, crashed := folder.with_name("crashed"))
    newest = sorted(crashed.glob("*.seg"))[-1]
    shape = Shape.of(ALIGNED)
    flip(newest, shape.offset(5) + HEADER_BYTES + 77)
    counted = offline.stat(crashed).num_blocks
    with opened(crashed, options=replace(OPTIONS, sync_bytes=ALIGN)) as (_, there):
        assert len(there) == counted == 43 + 15 - 1


def said_to_type(log: str) -> list[str]:
    """What follows `distserve kv` in a message."""
    return shlex.split(log.split("`distserve kv ")[1].split("`")[0])


def test_the_command_that_is_named_beside_files_set_aside_removes_them_and_nothing_else(folder, caplog):
    (folder / "00000099.seg").write_bytes(b"what is this")
    with opened(folder):
        pass
    assert (folder / "00000099.seg.damaged").exists()
    done = CliRunner().invoke(kv_app, said_to_type(caplog.text))
    assert done.exit_code == 0, done.output
    assert (offline.stat(folder).num_set_aside, offline.stat(folder).num_blocks) == (0, 43)


def test_the_command_that_is_named_beside_a_damaged_list_of_the_dead_removes_every_block(folder, caplog):
    with opened(folder) as (tier, there):
        tier.forget([there[h] for h in OLD])
    flip(folder / "dead.log", 16 * 3)
    with opened(folder) as (_, there):
        assert len(there) == 33 + 1, "one has come back"
    done = CliRunner().invoke(kv_app, said_to_type(caplog.text))
    assert done.exit_code == 0, done.output
    with opened(folder) as (_, there):
        assert there == {}


def test_verify_finds_and_sets_aside_what_is_damaged(folder):
    assert offline.verify(folder) == (43, 0, 0)
    flip(sorted(folder.glob("*.seg"))[0], 4096 + 4096 + 77)
    assert offline.verify(folder) == (42, 1, 0)
    assert offline.verify(folder) == (42, 0, 0)


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (43, {*OLD, *SHARED, *NEW}),
        (36, {*OLD[:3], *SHARED, *NEW}),
        (30, {*SHARED[:22], *NEW}),
        (10, {*SHARED[:10]}),
        (0, set()),
    ],
)
def test_prune_takes_the_oldest_conversation_first_from_its_end(folder, keep, left):
    pruned = offline.prune(folder, keep)
    assert (pruned.num_removed, pruned.num_left) == (43 - keep, keep)
    with opened(folder) as (tier, there):
        assert set(there) == left
        assert not any(served(tier, list(there.values()), list(there), ALIGNED))
    if keep == 0:
        assert pruned.freed_bytes > 43 * 8192
        assert list(folder.glob("*.seg")) == []


def test_prune_removes_what_was_set_aside(folder):
    (folder / "00000007.seg.foreign").write_bytes(b"f" * 5000)
    (folder / "00000008.seg.damaged").write_bytes(b"d" * 3000)
    assert (offline.stat(folder).num_set_aside, offline.stat(folder).set_aside_bytes) == (2, 8000)
    pruned = offline.prune(folder, 100)
    assert (pruned.num_files_removed, pruned.num_removed) == (2, 0)
    assert list(folder.glob("*.seg.*")) == []


@pytest.mark.parametrize("look", [offline.stat, offline.ls, offline.verify, lambda folder: offline.prune(folder, 0)])
def test_a_running_nodes_folder_is_refused_by_its_name_and_one_that_is_none_too(folder, tmp_path, look):
    with opened(folder):
        with pytest.raises(ConfigError, match="in use by node kv-a"):
            look(folder)
    for wrong in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="holds no blocks"):
            look(wrong)
    assert not (tmp_path / "nothing").exists()
