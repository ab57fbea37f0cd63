"""A sender in a process of its own.

python -m tests.gpu.ipc_peer write REGION      writes it by layers, commits, prints "committed SECONDS"
python -m tests.gpu.ipc_peer forever REGION    writes it over and over, never commits
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from distserve.messages import RemoteRegion
from distserve.transport.base import Span
from distserve.transport.cuda_ipc import CudaIpcSender
from tests.gpu.test_cuda_ipc import LAYOUT, gpu_pool, written


async def main(verb: str, text: str) -> None:
    region = msgspec.json.decode(text, type=RemoteRegion)
    _, memory = gpu_pool(7)
    sender = CudaIpcSender(memory, sender_id="peer")
    blocks = list(region.block_ids)
    if verb == "write":
        print("committed", await written(sender, region, blocks, 2), flush=True)
        await sender.stop()
        return
    transfer = await sender.open(region, timeout_s=20)
    while True:
        transfer.write([Span(0, LAYOUT.num_layers, tuple(blocks), tuple(range(len(blocks))))])
        await asyncio.sleep(0.0005)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
