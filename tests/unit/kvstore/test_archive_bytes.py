"""However many ask for it at once, only so many bytes are on their way to the object store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from distserve_kvstore import archive as archive_module
from distserve_kvstore.archive import Archive
from distserve_kvstore.object_io import ObjectIo
from distserve_kvstore.objects import ObjectRun
from tests.unit.kvstore.tier_parts import parts


async def test_puts_that_run_at_once_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with parts(tmp_path) as at:
        monkeypatch.setattr(archive_module, "PUT_BYTES", 10 * at.arena.block_bytes)
        archive = Archive(at.holdings, at.objects, None)
        now = most = 0
        real = ObjectIo.put

        async def put(self: ObjectIo, run: ObjectRun) -> int:
            nonlocal now, most
            now += len(run.payloads)
            most = max(most, now)
            try:
                await asyncio.sleep(0)
                return await real(self, run)
            finally:
                now -= len(run.payloads)

        monkeypatch.setattr(ObjectIo, "put", put)
        chains = [at.adopt(*range(100 * i + 1, 100 * i + 1 + n)) for i, n in enumerate((4, 4, 4, 20, 4, 4))]
        await asyncio.gather(*(archive.put(entries) for entries in chains))
        assert at.holdings.num_blocks["object"] == 40
        assert most == 20, "one that is larger than all goes, and goes alone"
        most = 0
        at.holdings.leave(chains[3], "object", "test")
        at.holdings.leave(chains[0], "object", "test")
        at.holdings.leave(chains[1], "object", "test")
        at.holdings.leave(chains[2], "object", "test")
        await asyncio.gather(*(archive.put(entries) for entries in chains[:3]))
        assert most == 8
