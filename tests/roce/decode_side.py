"""The receiving host of a test of two: keeps a pool and the book of leases as a decode worker does, and checks what
arrives byte by byte.

    python -m tests.roce.decode_side NATS_URL

Serves JSON requests on subject "lab.decode" until its standard input ends; prints "ready", and each lease that is
lost as a line of JSON. A committed lease's state
is the JSON [seed, number of blocks]: what its blocks must hold follows from the seed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from distserve.bus.base import Delivery
from distserve.bus.nats import NatsBus
from distserve.errors import PoolExhausted
from distserve.kv.block_pool import BlockPool
from distserve.kv.lease import LeaseTable, first_epoch
from distserve.messages import KVLayout
from distserve.transport.base import Commit, Lease, PoolMemory
from distserve.transport.options import StreamOptions
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.receiver import RdmaReceiver
from tests.contracts.transport.pools import pool

# 4 KiB a block, in two layers.
LAYOUT = KVLayout(weights="lab", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, rope="{}")
BLOCK_BYTES = 4096
NUM_BLOCKS = 1024
SUBJECT = "lab.decode"
# An emulated host takes ten times as long for everything that is not the network.
OPTIONS = RdmaOptions(common=StreamOptions(connect_timeout_s=20, peer_timeout_s=20, abort_timeout_s=10), ping_s=2.0)


def content(seed: int, num_blocks: int) -> np.ndarray:
    """uint8 [num_blocks, 2, 2048]."""
    words = np.arange(num_blocks * BLOCK_BYTES // 8, dtype=np.uint64) + np.uint64(seed * 1_000_003)
    mixed = words * np.uint64(0x9E3779B97F4A7C15)  # each word differs from every other, of this lease and others
    return mixed.view(np.uint8).reshape(num_blocks, LAYOUT.num_layers, -1)


@dataclass
class DecodeSide:
    memory: PoolMemory
    blocks: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    leases: LeaseTable = field(default_factory=lambda: LeaseTable(first_epoch()))
    granted: dict[int, Lease] = field(default_factory=dict)
    num_right: int = 0
    num_revoked: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)  # leases by why

    def on_commit(self, commit: Commit) -> None:
        lease = self.granted.pop(commit.lease_id)
        self.leases.commit(commit.lease_id, commit.epoch)
        seed, num_blocks = json.loads(commit.state)
        if np.array_equal(self.memory.blocks[lease.block_ids], content(seed, num_blocks)):
            self.num_right += 1
        else:
            self.wrong.append(f"lease {commit.lease_id} of epoch {commit.epoch}")
        self._free(lease)

    def on_lost(self, lease_id: int, epoch: int, error: Exception) -> None:
        lease = self.granted.pop(lease_id)
        assert lease.epoch == epoch
        self.leases.revoke(lease_id, epoch)
        self.lost[type(error).__name__] += 1
        self._free(lease)
        why = f"{type(error).__name__}: {error}"
        print(json.dumps({"lost": lease_id, "why": why, "free": self.blocks.num_free}), flush=True)

    def grant(self, receiver: RdmaReceiver, num_blocks: int) -> dict[str, Any]:
        try:
            ids = self.blocks.allocate(num_blocks)
        except PoolExhausted:
            return {"region": None}
        lease = self.leases.grant("lab", ids, 3600.0, 0.0)
        self.granted[lease.lease_id] = lease
        return {"region": msgspec.to_builtins(receiver.grant(lease))}

    async def revoke(self, receiver: RdmaReceiver, lease_id: int, epoch: int) -> dict[str, Any]:
        lease = self.granted.get(lease_id)
        began = time.monotonic()
        if lease is not None and lease.epoch == epoch:
            await receiver.revoke(lease_id, epoch)
            if self.granted.get(lease_id) is lease:
                del self.granted[lease_id]
                self.leases.revoke(lease_id, epoch)
                self.num_revoked += 1
                self._free(lease)
        return {"seconds": time.monotonic() - began}

    def report(self, receiver: RdmaReceiver) -> dict[str, Any]:
        self.blocks.check()
        self.leases.check()
        return {
            "right": self.num_right,
            "wrong": self.wrong,
            "lost": self.lost,
            "revoked": self.num_revoked,
            "open": len(self.granted),
            "free": self.blocks.num_free,
            "total": self.blocks.num_total,
            "objects": receiver._devices.nics[0].counts(),
            "fds": len(os.listdir("/proc/self/fd")),
        }

    def _free(self, lease: Lease) -> None:
        self.memory.blocks[lease.block_ids] = 0xEE  # a late writer would show in the next owner's bytes
        self.blocks.free(lease.block_ids)


async def main(url: str) -> None:
    bus = await NatsBus.connect(url, name="decode-side")
    with pool(NUM_BLOCKS, LAYOUT) as memory:
        side = DecodeSide(memory)
        receiver = RdmaReceiver(memory, bus, options=OPTIONS)
        await receiver.start(side.on_commit, side.on_lost)

        async def answer(delivery: Delivery) -> bytes:
            ask = json.loads(delivery.data)
            match ask["op"]:
                case "grant":
                    reply = side.grant(receiver, ask["num_blocks"])
                case "revoke":
                    reply = await side.revoke(receiver, ask["lease_id"], ask["epoch"])
                case "report":
                    reply = side.report(receiver)
                case other:
                    raise ValueError(f"op is {other!r}, must be grant, revoke or report")
            return json.dumps(reply).encode()

        subscription = await bus.serve(SUBJECT, answer)
        print("ready", flush=True)
        ended = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
        await ended.read()
        await subscription.close()
        await receiver.stop()
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
