"""KV from one GPU pool to another, between two processes and within one."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from distserve.errors import DistServeError, LeaseRevoked
from distserve.kv.layout import block_shape
from distserve.messages import KVLayout, RemoteRegion
from distserve.transport.base import Commit, Lease, PoolMemory, Span
from distserve.transport.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from distserve.transport.cuda_pool import cuda_pool_memory
from tests.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(120),
]

ROOT = Path(__file__).parents[2]
LAYOUT = KVLayout(
    weights="test", dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, rope="{}"
)  # 64 KiB a layer block, 2 MiB a block
NUM_BLOCKS = 600


def gpu_pool(seed: int | None) -> tuple[torch.Tensor, PoolMemory]:
    shape = (NUM_BLOCKS, *block_shape(LAYOUT))
    if seed is None:
        tensor = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    else:
        generator = torch.Generator("cuda").manual_seed(seed)
        tensor = torch.rand(shape, dtype=torch.bfloat16, device="cuda", generator=generator)
    torch.cuda.synchronize()
    return tensor, cuda_pool_memory(tensor, LAYOUT)


def scattered(count: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS))[:count]]


async def written(sender: CudaIpcSender, region: RemoteRegion, sources: list[int], layers: int) -> float:
    """Seconds from the last span to the adoption."""
    transfer = await sender.open(region, timeout_s=20)
    targets = tuple(range(len(sources)))
    for a in range(0, LAYOUT.num_layers, layers):
        transfer.write([Span(a, a + layers, tuple(sources), targets)])
    began = time.perf_counter()
    await transfer.commit(b"state", timeout_s=20)
    return time.perf_counter() - began


@pytest.mark.parametrize("layers", [1, 8, 32])
@pytest.mark.parametrize("in_order", [True, False])
async def test_what_arrives_is_what_was_sent(layers: int, in_order: bool) -> None:
    ours, source = gpu_pool(1)
    theirs, target = gpu_pool(None)
    sources = list(range(1, 101)) if in_order else scattered(100, 1)
    blocks = list(range(200, 300)) if in_order else scattered(100, 2)
    commits: list[Commit] = []
    async with AsyncExitStack() as stack:
        receiver, sender = CudaIpcReceiver(target), CudaIpcSender(source, sender_id="p")
        stack.push_async_callback(receiver.stop)
        stack.push_async_callback(sender.stop)
        await receiver.start(commits.append, lambda *lost: pytest.fail(str(lost)))
        await written(sender, receiver.grant(Lease(1, 1, blocks, 30.0)), sources, layers)
        assert torch.equal(theirs[blocks], ours[sources])
        untouched = [i for i in range(NUM_BLOCKS) if i not in blocks]
        assert not theirs[untouched].any()
        assert [c.state for c in commits] == [b"state"]


async def test_layers_leave_only_when_the_gpu_has_computed_them() -> None:
    """write() is called while kernels that make the layers are still queued, as by a pass."""
    ours, source = gpu_pool(1)
    theirs, target = gpu_pool(None)
    busy = torch.rand(8192, 8192, device="cuda")
    async with AsyncExitStack() as stack:
        receiver, sender = CudaIpcReceiver(target), CudaIpcSender(source, sender_id="p")
        stack.push_async_callback(receiver.stop)
        stack.push_async_callback(sender.stop)
        await receiver.start(lambda commit: None, lambda *lost: None)
        transfer = await sender.open(receiver.grant(Lease(1, 1, list(range(1, 41)), 30.0)), timeout_s=20)
        for _ in range(40):
            busy = busy @ busy * 1e-9
        ours[1:41] = 3.0  # behind all that
        transfer.write([Span(0, LAYOUT.num_layers, tuple(range(1, 41)), tuple(range(40)))])
        await transfer.commit(b"", timeout_s=20)
        assert bool((theirs[1:41] == 3.0).all())


async def test_a_revoked_lease_is_written_no_more() -> None:
    _, source = gpu_pool(1)
    theirs, target = gpu_pool(None)
    async with AsyncExitStack() as stack:
        receiver, sender = CudaIpcReceiver(target), CudaIpcSender(source, sender_id="p")
        stack.push_async_callback(receiver.stop)
        stack.push_async_callback(sender.stop)
        await receiver.start(lambda commit: None, lambda *lost: None)
        transfer = await sender.open(receiver.grant(Lease(1, 1, [5], 30.0)), timeout_s=20)
        await receiver.revoke(1)
        theirs[5] = 7.0
        torch.cuda.synchronize()
        transfer.write([Span(0, LAYOUT.num_layers, (1,), (0,))])
        with pytest.raises(LeaseRevoked):
            await transfer.commit(b"", timeout_s=20)
        assert bool((theirs[5] == 7.0).all())


async def spawn(stack: AsyncExitStack, *args: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.gpu.ipc_peer", *args,
        cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await asyncio.wait_for(process.communicate(), 10)

    stack.push_async_callback(end)
    return process


async def test_from_another_process() -> None:
    theirs, target = gpu_pool(None)
    ours, _ = gpu_pool(7)  # the same bytes as the other process draws
    async with AsyncExitStack() as stack:
        receiver = CudaIpcReceiver(target)
        stack.push_async_callback(receiver.stop)
        commits: list[Commit] = []
        await receiver.start(commits.append, lambda *lost: pytest.fail(str(lost)))
        region = receiver.grant(Lease(1, 1, list(range(1, 513)), 60.0))
        process = await spawn(stack, "write", msgspec.json.encode(region).decode())
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line.startswith(b"committed"), line
        await until(lambda: bool(commits), 10, "the commit")
        assert torch.equal(theirs[1:513], ours[1:513])


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sender_that_dies_or_freezes_in_mid_copy_harms_only_its_lease(sig: signal.Signals) -> None:
    """The receiver's GPU goes on: it reads memory whose owner is gone."""
    theirs, target = gpu_pool(None)
    lost: list[Exception] = []
    async with AsyncExitStack() as stack:
        receiver = CudaIpcReceiver(target)
        stack.push_async_callback(receiver.stop)
        await receiver.start(lambda commit: None, lambda lease_id, epoch, e: lost.append(e))
        region = receiver.grant(Lease(1, 1, list(range(1, 513)), 60.0))
        process = await spawn(stack, "forever", msgspec.json.encode(region).decode())
        await until(lambda: bool(theirs[1].any()), 60, "the first bytes")
        process.send_signal(sig)
        if sig is signal.SIGKILL:
            await until(lambda: bool(lost), 10, "the loss")
            assert isinstance(lost[0], DistServeError)
        else:
            await asyncio.wait_for(receiver.revoke(1), 10)
            process.send_signal(signal.SIGCONT)
        theirs[1:513] = 2.0
        torch.cuda.synchronize()
        ours, source = gpu_pool(3)
        sender = CudaIpcSender(source, sender_id="other")
        stack.push_async_callback(sender.stop)
        await written(sender, receiver.grant(Lease(2, 2, list(range(520, 560)), 30.0)), list(range(1, 41)), 32)
        assert torch.equal(theirs[520:560], ours[1:41])
        assert bool((theirs[1:513] == 2.0).all()), "a late copy"
