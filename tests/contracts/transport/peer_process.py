"""The other side as a process of its own, to be killed and frozen.

    python -m tests.contracts.transport.peer_process receive KIND    prints a region a line, then "commit LEASE" lines
    python -m tests.contracts.transport.peer_process send REGION     writes it over and over, never commits

Both end when their standard input does.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from distserve.bus.base import Bus
from distserve.bus.nats import NatsBus
from distserve.messages import RemoteRegion
from distserve.transport.base import Lease, PoolMemory, Span
from distserve.transport.factory import make_receiver, make_sender
from tests.contracts.transport.fake_device import FakeDevice
from tests.contracts.transport.pools import SMALL, pool

NUM_BLOCKS = 64
LEASES = [list(range(1, 21)), list(range(21, 41)), list(range(41, 61))]


async def _input_ended() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def _bus(kind: str) -> Bus | None:
    return await NatsBus.connect(os.environ["DISTSERVE_TEST_NATS"], name="peer") if kind == "rdma" else None


def _shown(kind: str, memory: PoolMemory) -> PoolMemory:
    """The pool as the transport sees it."""
    if kind != "cuda_ipc":
        return memory
    return PoolMemory(memory.layout, blocks=None, on_device=FakeDevice(memory, shares=True))


async def receive(kind: str) -> None:
    with pool(NUM_BLOCKS) as backing:
        memory = _shown(kind, backing)
        bus = await _bus(kind)
        receiver = make_receiver(kind, memory, bus=bus)
        await receiver.start(lambda commit: print("commit", commit.lease_id, flush=True), lambda *_: None)
        for i, block_ids in enumerate(LEASES):
            region = receiver.grant(Lease(i + 1, 1, block_ids, 60.0))
            print(msgspec.json.encode(region).decode(), flush=True)
        await _input_ended()
        await receiver.stop()


async def send(text: str) -> None:
    region = msgspec.json.decode(text, type=RemoteRegion)
    with pool(NUM_BLOCKS, seed=7) as backing:
        kind = region.endpoint.kind
        memory = _shown(kind, backing)
        sender = make_sender(kind, memory, sender_id="victim", bus=await _bus(kind))
        transfer = await sender.open(region, timeout_s=10)
        ended = asyncio.create_task(_input_ended())
        targets = tuple(range(len(region.block_ids)))
        sources = tuple(t + 1 for t in targets)
        while not ended.done():
            transfer.write([Span(0, SMALL.num_layers, sources, targets)] * 4)
            await asyncio.sleep(0)
        await sender.stop()


if __name__ == "__main__":
    asyncio.run({"receive": receive, "send": send}[sys.argv[1]](sys.argv[2]))
