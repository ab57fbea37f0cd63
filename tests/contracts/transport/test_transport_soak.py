"""Two hundred leases with faults drawn at random: what is committed is right, and every block is accounted for."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from distserve.errors import DistServeError, PoolExhausted
from distserve.kv.block_pool import BlockPool
from distserve.kv.lease import LeaseTable
from distserve.transport.base import Commit, Lease, Span, Transfer
from tests.contracts.transport.conftest import Rig
from tests.contracts.transport.pools import SMALL
from tests.contracts.transport.proxy import Proxy

NUM_BLOCKS = 96
EXPIRY_S = 0.5
FAULTS = ("none", "none", "none", "none", "abort", "revoke", "forget a layer", "cut", "stale", "timeout", "silence")


@dataclass
class DecodeSide:
    """What a decode worker keeps: the pool, the book of leases, and for each lease the bytes that should come."""

    rig: Rig
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    leases: LeaseTable = field(default_factory=LeaseTable)
    granted: dict[int, tuple[Lease, np.ndarray]] = field(default_factory=dict)
    num_right: int = 0
    num_lost: int = 0
    wrong: list[str] = field(default_factory=list)

    def grant(self, expected: np.ndarray) -> Lease:
        lease = self.leases.grant("p", self.pool.allocate(len(expected)), 60.0, 0.0)
        self.granted[lease.lease_id] = (lease, expected)
        return lease

    def on_commit(self, commit: Commit) -> None:
        lease, expected = self.granted.pop(commit.lease_id)
        self.leases.commit(commit.lease_id, commit.epoch)
        if np.array_equal(self.rig.target.blocks[lease.block_ids], expected):
            self.num_right += 1
        else:
            self.wrong.append(f"lease {commit.lease_id} epoch {commit.epoch}")
        self._free(lease)

    def on_lost(self, lease_id: int, epoch: int, error: Exception) -> None:
        lease, _ = self.granted.pop(lease_id)
        assert self.leases.revoke(lease_id, lease.epoch) is lease
        self.num_lost += 1
        self._free(lease)

    def holds(self, lease: Lease) -> bool:
        return self.granted.get(lease.lease_id, (None,))[0] is lease

    async def revoke(self, lease: Lease) -> None:
        await self.rig.receiver.revoke(lease.lease_id, lease.epoch)
        if self.holds(lease):
            del self.granted[lease.lease_id]
            self.leases.revoke(lease.lease_id, lease.epoch)
            self._free(lease)

    def _free(self, lease: Lease) -> None:
        self.rig.target.blocks[lease.block_ids] = 0xEE  # a late writer would show in the next owner's bytes
        self.pool.free(lease.block_ids)


@pytest.mark.parametrize("seed", [1, 2])
async def test_two_hundred_leases_with_random_faults(bare_rig: Rig, seed: int) -> None:
    bare_rig.landing_bytes = 20 * 8192  # leases wait for room there
    rig = await bare_rig.start(NUM_BLOCKS)
    decode = DecodeSide(rig)
    rig.on_commit = decode.on_commit
    rig.on_lost = decode.on_lost
    prefill = BlockPool(NUM_BLOCKS)
    proxy = rig.add_proxy()
    rng = random.Random(seed)
    counts = {"committed": 0, "failed": 0}

    async def ended(lease: Lease) -> None:
        """Most leases end by a word from the transport. One whose sender was cut off before it could say its id is
        only silent: the owner lets it expire."""
        while decode.holds(lease):
            if (rig.receiver.idle_s(lease.lease_id) or 0.0) > EXPIRY_S:
                await decode.revoke(lease)
            await asyncio.sleep(0.005)

    async def one() -> None:
        fault, n = rng.choice(FAULTS), rng.randrange(9)
        while True:
            try:
                sources = prefill.allocate(n)
                break
            except PoolExhausted:
                await asyncio.sleep(0.001)
        rng.shuffle(sources)
        rig.source.blocks[sources] = np.frombuffer(rng.randbytes(n * 8192), np.uint8).reshape(n, 4, 2048)
        lease = decode.grant(rig.source.blocks[sources].copy())
        try:
            region = rig.receiver.grant(lease)
            if fault == "stale":
                await decode.revoke(lease)
            transfer = await rig.sender.open(proxy.redirect(region), timeout_s=10)
            await write_and_end(transfer, lease, sources, fault, proxy)
            counts["committed"] += 1
        except DistServeError:
            counts["failed"] += 1
        finally:
            # The contract: from here on nobody reads the source blocks. The next lease overwrites them.
            if fault in ("silence", "stale"):
                await decode.revoke(lease)
            prefill.free(sources)
        async with asyncio.timeout(10):
            await ended(lease)

    async def write_and_end(transfer: Transfer, lease: Lease, sources: list[int], fault: str, proxy: Proxy) -> None:
        cells = [(layer, i) for layer in range(SMALL.num_layers) for i in range(len(sources))]
        rng.shuffle(cells)
        if fault == "forget a layer" and cells:
            cells.pop()
        trouble_at = rng.randrange(len(cells) + 1)
        for k in range(len(cells) + 1):
            if k == trouble_at:
                if fault in ("abort", "silence"):
                    await transfer.abort("drawn")
                elif fault == "revoke":
                    await decode.revoke(lease)
                elif fault == "cut":
                    proxy.cut()
            if k < len(cells):
                layer, i = cells[k]
                transfer.write([Span(layer, layer + 1, (sources[i],), (i,))])
            if rng.random() < 0.1:
                await asyncio.sleep(0)
        await transfer.commit(rng.randbytes(64), timeout_s=0.0001 if fault == "timeout" else 10)

    async def lane(numbers: range) -> None:
        for _ in numbers:
            await one()

    async with asyncio.timeout(90):
        await asyncio.gather(*(lane(range(i, 200, 8)) for i in range(8)))
    assert not decode.wrong
    assert counts["committed"] + counts["failed"] == 200
    assert decode.num_right >= counts["committed"] >= 40
    assert counts["failed"] >= 40
    assert decode.num_lost >= 10  # told by the transport, not found by expiry
    for pool in (decode.pool, prefill):
        pool.check()
        assert pool.num_free == pool.num_total
    decode.leases.check()
    assert not len(decode.leases)
    assert not decode.granted
