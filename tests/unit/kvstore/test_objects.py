"""The object tier over a folder and over memory: what it keeps, what it refuses."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from distserve.errors import BlockDamaged, BlocksMissing, ConfigError, KVError, ObjectStoreDown
from distserve.kv.layout import fingerprint
from distserve_kvstore.objects import ObjectOptions, ObjectRun, ObjectTier
from tests.unit.kvstore.stored_blocks import ALIGNED, OTHER, chain, content, records, rows
from tests.waiting import until

SIZE = 8192


def run_of(name: str, n: int, start: int = 0) -> ObjectRun:
    hashes = chain(name, n)
    made = records(hashes, ALIGNED)
    return ObjectRun(hashes[0], hashes, bytes(32), start, "tenant", f"talk {name}", [r.payload for r in made])


async def served(tier: ObjectTier, name: str, run: ObjectRun, first: int, n: int) -> list[Exception | None]:
    """What get() says of each block; what it serves is what it must be."""
    into = rows(n, ALIGNED)
    errors = await tier.get(name, run.hashes[first : first + n], first, [row.data for row in into])
    for h, row, error in zip(run.hashes[first:], into, errors, strict=False):
        assert error is not None or (row == content(h, SIZE)).all()
    return errors


@pytest.fixture(params=["file", "memory"])
async def tier(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectTier]:
    url = f"file://{tmp_path}/with space/objects" if request.param == "file" else "memory:///"
    tier = ObjectTier.open(url, ALIGNED)
    yield tier
    assert tier.state == "ok"
    await tier.close()


async def test_a_run_comes_back_whole_and_in_part(tier):
    run = run_of("a", 64, start=128)
    name = await tier.put(run)
    for first, n in ((0, 64), (0, 1), (63, 1), (10, 20)):
        assert await served(tier, name, run, first, n) == [None] * n
    assert await tier.get(name, [], 0, []) == []
    header = await tier.head(name)
    assert (header.start, header.tenant, header.conversation) == (128, "tenant", "talk a")
    assert (header.num_blocks, header.key, list(header.hashes)) == (64, run.key, run.hashes)


async def test_only_what_was_asked_for_is_served(tier):
    run, other = run_of("a", 8), run_of("b", 8)
    name = await tier.put(run)
    for hashes, first in ((other.hashes, 0), (run.hashes, 1), (run.hashes[4:], 0), (run.hashes[:4], 6)):
        into = rows(len(hashes), ALIGNED)
        errors = await tier.get(name, hashes, first, [row.data for row in into])
        assert all(isinstance(e, BlocksMissing) for e in errors)
        assert not into.any()
    with pytest.raises(KVError, match="buffers of 8192 bytes"):
        await tier.get(name, run.hashes[:1], 0, [memoryview(bytearray(5))])


async def test_what_is_there_is_listed_in_order_page_by_page_and_only_of_this_layout(tier):
    names = sorted([await tier.put(run_of(f"{i}", 1 + i % 5)) for i in range(30)])
    assert await tier.names() == names
    listed: list[str] = []
    while page := await tier.names(after=listed[-1] if listed else "", limit=7):
        assert len(page) <= 7
        listed += page
    assert listed == names
    assert [h.name async for h in tier.headers()] == names
    assert [h.name async for h in tier.headers(after=names[19])] == names[20:]
    assert {h.conversation async for h in tier.headers()} == {f"talk {i}" for i in range(30)}


async def test_what_is_deleted_is_gone_and_deleting_nothing_is_fine(tier):
    names = [await tier.put(run_of(f"{i}", 2)) for i in range(20)]
    await tier.delete([*names[:15], names[0], names[0][:-1] + "x"])
    assert await tier.names() == sorted(names[15:])
    with pytest.raises(BlocksMissing, match="there is no object"):
        await tier.head(names[0])
    with pytest.raises(BlocksMissing):
        await served(tier, names[0], run_of("0", 2), 0, 2)


async def test_put_again_it_is_the_new_one(tier):
    run = run_of("a", 3)
    name = await tier.put(run)
    again = ObjectRun(run.key, run.hashes, run.parent, 0, "tenant", "another", run.payloads)
    assert await tier.put(again) == name
    assert (await tier.head(name)).conversation == "another"
    assert await tier.names() == [name]


async def test_tiers_of_other_layouts_share_the_place_and_see_nothing_of_each_other(tmp_path):
    url = f"file://{tmp_path}"
    ours, theirs = ObjectTier.open(url, ALIGNED), ObjectTier.open(url, OTHER)
    run = run_of("a", 2)
    name = await ours.put(run)
    assert await theirs.names() == []
    with pytest.raises(BlockDamaged, match=f"holds blocks of layout {fingerprint(ALIGNED)[:16]}"):
        await theirs.head(name)


@pytest.mark.parametrize("at", [0, 9, 100, 4095, 4096, 4096 + 3 * SIZE + 5])
async def test_a_flipped_bit_is_found_and_costs_what_it_hits(tmp_path, at, caplog):
    tier, run = ObjectTier.open(f"file://{tmp_path}", ALIGNED), run_of("a", 4)
    name, other = await tier.put(run), await tier.put(run_of("b", 4))
    raw = bytearray((tmp_path / name).read_bytes())
    raw[at] ^= 4
    (tmp_path / name).write_bytes(raw)
    if at < 4096:
        for call in (tier.head(name), served(tier, name, run, 0, 4), served(tier, name, run, 2, 2)):
            with pytest.raises(BlockDamaged, match="is not served"):
                await call
        assert [h.name async for h in tier.headers()] == [other]
    else:
        hit = (at - 4096) // SIZE
        errors = await served(tier, name, run, 0, 4)
        assert [i for i, e in enumerate(errors) if e is not None] == [hit]
        assert isinstance(errors[hit], BlockDamaged)
        assert errors[hit].where == f"object {name}, block {hit}"
        assert not any(await served(tier, name, run, 0, hit)) or hit == 0
    assert f"object {name}" in caplog.text
    assert await tier.put(run) == name, "written anew it is whole again"
    assert await served(tier, name, run, 0, 4) == [None] * 4
    assert tier.state == "ok", "an object is damaged, not the store"


@pytest.mark.parametrize("length", [0, 100, 4096, 4096 + SIZE + 10])
async def test_an_object_that_ends_early_serves_what_it_has(tmp_path, length):
    tier, run = ObjectTier.open(f"file://{tmp_path}", ALIGNED), run_of("a", 3)
    name = await tier.put(run)
    os.truncate(tmp_path / name, length)
    if length < 4096:
        with pytest.raises(BlockDamaged, match=f"has {length} bytes"):
            await served(tier, name, run, 0, 3)
    else:
        errors = await served(tier, name, run, 0, 3)
        assert [e is None for e in errors] == [i < (length - 4096) // SIZE for i in range(3)]
        with pytest.raises(BlockDamaged, match="has 0 bytes"):  # what it has is not even near
            await served(tier, name, run, 2, 1)
    assert tier.state == "ok"


async def test_files_of_other_kinds_among_them_are_passed_over(tmp_path):
    tier = ObjectTier.open(f"file://{tmp_path}", ALIGNED)
    name = await tier.put(run_of("a", 1))
    for other in ("README", f"v1/{fingerprint(ALIGNED)[:16]}/notes.txt", f"{name}.tmp"):
        (tmp_path / other).write_text("hello")
    assert await tier.names() == [name]
    assert [h.name async for h in tier.headers()] == [name]


@pytest.mark.parametrize(
    "url", ["", "objects", "/var/objects", "bogus://bucket", "http://host/bucket", "ftp://host/x", "az://container/x"]
)
def test_a_url_that_can_not_be_used_is_refused_by_its_key(url, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match=r"kvstore\.object_url") as refused:
        ObjectTier.open(url, ALIGNED)
    assert (refused.value.key, refused.value.value) == ("kvstore.object_url", url)


async def test_a_folder_that_refuses_is_down_and_up_again_when_it_takes(tmp_path):
    tier = ObjectTier.open(f"file://{tmp_path}/o", ALIGNED, ObjectOptions(backoff_s=(0.01, 0.01)))
    (tmp_path / "o" / "v1").write_text("a file where a folder should be")
    with pytest.raises(ObjectStoreDown, match="a put fails"):
        await tier.put(run_of("a", 1))
    assert tier.state.startswith("down: a put fails: ")
    assert "Debug source" not in tier.state
    (tmp_path / "o" / "v1").unlink()
    await until(lambda: not tier.down_for_s)
    assert await tier.put(run_of("a", 1))
    assert tier.state == "ok"
