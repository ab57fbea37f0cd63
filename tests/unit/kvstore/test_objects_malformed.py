"""Objects whose checksum is right and whose header lies: they are not served, and the others are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from distserve.kv.layout import block_bytes, fingerprint
from distserve.messages.store import MAX_DEPTH
from distserve_kvstore.archive import Archive
from distserve_kvstore.columns import Entries
from distserve_kvstore.index import BlockIndex
from distserve_kvstore.node import Node
from distserve_kvstore.objects import ObjectRun, ObjectTier
from distserve_kvstore.objects import format as objects_format
from distserve_kvstore.objects.format import HEADER_BYTES, Kind, NotServed, parse_header
from distserve_kvstore.upkeep import restore_objects
from tests.unit.kvstore.stored_blocks import ALIGNED, chain
from tests.unit.kvstore.tier_parts import parts

KIND = Kind(fingerprint(ALIGNED), block_bytes(ALIGNED))
KEY, LAST, ROOT = b"k" * 32, b"l" * 32, bytes(32)
NAME = KIND.name(KEY, LAST)


def header(n: int, start: int = 0, tenant: bytes = b"", tenant_bytes: int | None = None, room: int = 0) -> bytes:
    """With a right checksum."""
    raw = bytearray(HEADER_BYTES)
    length = len(tenant) if tenant_bytes is None else tenant_bytes
    digest = bytes.fromhex(KIND.fingerprint)
    fixed = objects_format._FIXED
    fixed.pack_into(raw, 0, objects_format._MAGIC, 1, digest, KIND.block_bytes, n, start, ROOT, KEY, length, room)
    rest = tenant + LAST * min(n, 100)
    raw[fixed.size : fixed.size + len(rest)] = rest
    end = HEADER_BYTES - 8
    objects_format._SUM.pack_into(raw, end, xxh3_64_intdigest(memoryview(raw)[:end]))
    return bytes(raw)


LIES = {
    "no block": header(0),
    "more blocks than an object has": header(65),
    "more blocks than a header has room for": header(1 << 31),
    "a depth that is none": header(1, start=(1 << 63) + 5),
    "a depth beyond the last": header(2, start=MAX_DEPTH - 1),
    "a tenant that is no text": header(1, tenant=b"\xff\xfe"),
    "a tenant longer than any": header(1, tenant_bytes=60_000),
    "a conversation longer than any": header(1, room=60_000),
}


def test_an_honest_header_of_this_kind_is_one() -> None:
    assert parse_header(NAME, memoryview(header(1, start=MAX_DEPTH - 1)), KIND).num_blocks == 1


@pytest.mark.parametrize("raw", LIES.values(), ids=LIES.keys())
def test_a_header_that_lies_is_not_served(raw: bytes) -> None:
    with pytest.raises(NotServed):
        parse_header(NAME, memoryview(raw), KIND)


@pytest.mark.parametrize("raw", LIES.values(), ids=LIES.keys())
async def test_the_list_of_objects_goes_on_behind_it(tmp_path: Path, raw: bytes) -> None:
    tier = ObjectTier.open(f"file://{tmp_path}", ALIGNED)
    hashes = chain("z", 2)
    payloads = list(np.zeros((2, KIND.block_bytes), np.uint8))
    good = await tier.put(ObjectRun(hashes[0], hashes, ROOT, 0, "t", "c", payloads))
    (tmp_path / NAME).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / NAME).write_bytes(raw)
    assert [h.name async for h in tier.headers()] == [good]


async def test_an_object_that_the_index_chokes_on_is_left_out_and_the_others_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with parts(tmp_path) as at:
        archive = Archive(at.holdings, at.objects, None)
        runs = [at.adopt(*range(100 * i + 1, 100 * i + 4)) for i in range(3)]
        for entries in runs:
            await archive.put(entries)
            at.holdings.leave(entries, "object", "test")
        bad = at.holdings.index.hash_of(int(runs[1][0]))
        real = BlockIndex.insert

        def insert(self: BlockIndex, hashes: bytes, *rest: Any) -> Entries:
            if hashes.startswith(bad):
                raise OverflowError("too large for this index")
            return real(self, hashes, *rest)

        monkeypatch.setattr(BlockIndex, "insert", insert)
        node = SimpleNamespace(objects=at.objects, holdings=at.holdings, deletions=at.deletions)
        await asyncio.wait_for(restore_objects(cast(Node, node)), 20)
        assert at.holdings.num_blocks["object"] == 6
        assert "is left out" in caplog.text
