"""The hand-over of KV from one process's GPU pool to another's, past the host (cuda_ipc), at the shape of Llama-3-8B.

    python -m benchmarks.gpu_handoff [--tokens 512 2048 8192] [--repeat 9] [--json FILE]

Two processes on one GPU, pools of bf16. `all`: every layer is written at once, as after a recorded pass: from the
first span to the adoption. `last`: all but the last 2 of 32 layers were written before and have had time to leave, as
they do behind a forward pass: from the last span to the adoption, which is what a request waits for. Floor: one copy
of the same blocks within one process, by torch, and two plain sums over them, timed by the GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from typing import Any

import msgspec
import torch

from distserve.kv.layout import block_bytes, block_shape
from distserve.messages import KVLayout, RemoteRegion
from distserve.transport.base import Lease, PoolMemory, Span
from distserve.transport.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from distserve.transport.cuda_pool import cuda_pool_memory

LAYOUT = KVLayout(
    weights="random", dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, rope="{}"
)
NUM_BLOCKS = 1100
BEFORE_S = 0.05  # for what was written before to have left


def pool() -> tuple[torch.Tensor, PoolMemory]:
    tensor = torch.rand((NUM_BLOCKS, *block_shape(LAYOUT)), dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    return tensor, cuda_pool_memory(tensor, LAYOUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json")
    a = parser.parse_args()
    rows = asyncio.run(measure_all(a.tokens, a.repeat))
    print("| tokens | MiB | floor ms | all ms | GB/s | last layers ms |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        gbs = row["num_bytes"] / row["all_s"] / 1e9
        print(
            f"| {row['tokens']:,} | {row['num_bytes'] >> 20:,} | {1e3 * row['floor_s']:.2f} | {1e3 * row['all_s']:.2f} "
            f"| {gbs:.0f} | {1e3 * row['last_s']:.2f} |"
        )
    if a.json:
        with open(a.json, "w") as f:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, f, indent=1)


async def measure_all(tokens: list[int], repeat: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    rows = []
    try:
        tensor, memory = pool()
        sender = CudaIpcSender(memory, sender_id="bench")
        for num_tokens in tokens:
            blocks = list(range(1, 1 + num_tokens // LAYOUT.block_size))
            found: dict[str, list[float]] = {"all": [], "last": []}
            for kind in ("all", "last"):
                for i in range(repeat + 1):  # the first opens the connection, or is cold
                    ours.send(blocks)
                    seconds = await one(sender, msgspec.json.decode(ours.recv(), type=RemoteRegion), blocks, kind)
                    if i:
                        found[kind].append(seconds)
            rows.append(
                {
                    "tokens": num_tokens,
                    "num_bytes": len(blocks) * block_bytes(LAYOUT),
                    "floor_s": floor(tensor, len(blocks)),
                    "all_s": statistics.median(found["all"]),
                    "last_s": statistics.median(found["last"]),
                    "all_max_s": max(found["all"]),
                    "last_max_s": max(found["last"]),
                }
            )
        await sender.stop()
    finally:
        ours.send(None)
        process.join(20)
    return rows


async def one(sender: CudaIpcSender, region: RemoteRegion, blocks: list[int], kind: str) -> float:
    transfer = await sender.open(region, timeout_s=30)
    targets, split = tuple(range(len(blocks))), 0 if kind == "all" else LAYOUT.num_layers - 2
    if split:
        for layer in range(0, split, 2):
            transfer.write([Span(layer, layer + 2, tuple(blocks), targets)])
        await asyncio.sleep(BEFORE_S)
    began = time.perf_counter()
    transfer.write([Span(split, LAYOUT.num_layers, tuple(blocks), targets)], awaited=True)
    await transfer.commit(b"", timeout_s=30)
    return time.perf_counter() - began


def floor(tensor: torch.Tensor, count: int) -> float:
    """Seconds of one copy and two passes of sums over `count` blocks."""
    words = tensor.view(torch.int64).view(NUM_BLOCKS, -1)
    out = torch.empty_like(words[:count])
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        out.copy_(words[1 : 1 + count])
        out.sum(dim=1)
        words[1 : 1 + count].sum(dim=1)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def receive(pipe: Any) -> None:
    asyncio.run(serve(pipe))


async def serve(pipe: Any) -> None:
    _, memory = pool()
    receiver = CudaIpcReceiver(memory)
    await receiver.start(lambda commit: None, lambda *lost: print("lost", lost))
    lease_id = 0
    while (blocks := await asyncio.to_thread(pipe.recv)) is not None:
        lease_id += 1
        region = receiver.grant(Lease(lease_id, 1, [block + 500 for block in blocks], 60.0))
        pipe.send(msgspec.json.encode(region))
    await receiver.stop()


if __name__ == "__main__":
    main()
