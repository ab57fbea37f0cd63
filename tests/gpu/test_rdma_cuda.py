"""KV pools in a GPU's memory over rdma: from one pool to another, by network cards that exist only in this process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.errors import LeaseRevoked
from distserve.kv.checksum import block_sums, partial_sums
from distserve.kv.layout import block_bytes, block_shape
from distserve.messages import KVLayout
from distserve.transport.base import Commit, Lease, Span, Transfer
from distserve.transport.cuda_pool import CudaPool, cuda_pool_memory
from distserve.transport.rdma.dmabuf import CudaDriver
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.receiver import RdmaReceiver
from distserve.transport.rdma.sender import RdmaSender
from distserve.transport.staging import CudaCopier
from tests.contracts.transport.soft_fabric import SoftFabric
from tests.contracts.transport.wire import Wire
from tests.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LAYOUT = KVLayout(
    weights="test", dtype="bfloat16", num_layers=6, num_kv_heads=4, head_dim=32, block_size=16, rope="{}"
)  # 8 KiB a layer block, 48 KiB a block
NUM_BLOCKS = 64
OPTIONS = RdmaOptions(stage_slots=3, stage_slot_bytes=100_000, landing_bytes=40 * block_bytes(LAYOUT))


def random_pool(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    size = NUM_BLOCKS * block_bytes(LAYOUT)
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=generator)
    return raw.view(torch.bfloat16).view(NUM_BLOCKS, *block_shape(LAYOUT))


def bytes_of(pool: torch.Tensor) -> np.ndarray:
    """uint8 [num_blocks, num_layers, layer_block_bytes]."""
    return pool.view(torch.uint8).reshape(NUM_BLOCKS, LAYOUT.num_layers, -1).cpu().numpy()


@dataclass
class Rig:
    source: torch.Tensor
    target: torch.Tensor
    sender: RdmaSender
    receiver: RdmaReceiver
    wire: Wire
    commits: list[Commit] = field(default_factory=list)
    losses: list[Exception] = field(default_factory=list)

    async def open(self, lease_id: int, block_ids: list[int]) -> Transfer:
        region = self.receiver.grant(Lease(lease_id, 1, block_ids, 30.0))
        return await self.sender.open(region, timeout_s=10)

    def assert_arrived(self, sources: list[int], block_ids: list[int]) -> None:
        assert np.array_equal(bytes_of(self.target)[block_ids], bytes_of(self.source)[sources])


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        fabric, hub, wire = SoftFabric(), MemoryHub(), Wire()
        stack.callback(fabric.close)
        open_nics = fabric.opener(registers_dmabufs=False)
        buses = [await stack.enter_async_context(MemoryBus(hub)) for _ in range(2)]
        source, target = random_pool(1), torch.zeros_like(random_pool(1))
        receiver = RdmaReceiver(cuda_pool_memory(target, LAYOUT), buses[0], options=OPTIONS, open_nics=open_nics)
        commits: list[Commit] = []
        losses: list[Exception] = []
        await receiver.start(commits.append, lambda _, __, error: losses.append(error))
        stack.push_async_callback(receiver.stop)
        sender = RdmaSender(
            cuda_pool_memory(source, LAYOUT),
            buses[1],
            sender_id="prefill-0",
            options=OPTIONS,
            open_nics=wire.through(open_nics),
        )
        stack.push_async_callback(sender.stop)
        stack.callback(wire.close)
        yield Rig(source, target, sender, receiver, wire, commits, losses)


async def test_blocks_go_from_gpu_to_gpu_and_no_others_change(rig: Rig):
    assert rig.sender.pool_access.startswith("staged: ")
    assert rig.receiver.pool_access.startswith("staged: ")
    rng = np.random.default_rng(0)
    sources, block_ids = (rng.permutation(np.arange(1, NUM_BLOCKS))[:30].tolist() for _ in range(2))
    transfer = await rig.open(1, block_ids)
    transfer.write([Span(0, 6, tuple(sources), tuple(range(30)))])
    assert await transfer.commit(b"state", timeout_s=20) == 30 * block_bytes(LAYOUT)
    rig.assert_arrived(sources, block_ids)
    others = sorted(set(range(NUM_BLOCKS)) - set(block_ids))
    assert not bytes_of(rig.target)[others].any()
    assert [commit.state for commit in rig.commits] == [b"state"]


async def test_layers_are_sent_as_they_are_computed_and_arrive_as_they_became(rig: Rig):
    sources, targets = tuple(range(1, 31)), tuple(range(30))
    transfer = await rig.open(1, list(range(10, 40)))
    factors = torch.randn(4000, 4000, device="cuda")
    for layer in range(6):
        product = factors
        for _ in range(4):  # still running when the span is written
            product = torch.tanh(product @ factors)
        zero = (product.sum() > 1e30).to(torch.bfloat16)  # known only at the end
        rig.source[:, layer] = torch.full_like(rig.source[:, layer], 1.5 + layer) + zero
        transfer.write([Span(layer, layer + 1, sources, targets)])
    await transfer.commit(b"", timeout_s=30)
    rig.assert_arrived(list(sources), list(range(10, 40)))
    assert float(rig.target[10, 5].float().mean()) == 6.5


async def test_a_link_that_breaks_is_staged_again_and_several_leases_go_on(rig: Rig):
    transfers = [await rig.open(1 + i, list(range(1 + 10 * i, 11 + 10 * i))) for i in range(4)]
    for i, transfer in enumerate(transfers):
        transfer.write([Span(0, 3, tuple(range(11 + 10 * i, 21 + 10 * i)), tuple(range(10)))])
    await until(lambda: rig.wire.forwarded > 10 * 3 * 8192, 20, "a lease's first half")
    rig.wire.cut()
    for i, transfer in enumerate(transfers):
        transfer.write([Span(3, 6, tuple(range(11 + 10 * i, 21 + 10 * i)), tuple(range(10)))])
    await asyncio.gather(*(transfer.commit(b"", timeout_s=30) for transfer in transfers))
    rig.assert_arrived(list(range(11, 51)), list(range(1, 41)))
    assert not rig.losses


async def test_a_revoked_leases_blocks_are_not_written_after_its_fence(rig: Rig):
    for attempt in range(10):
        transfer = await rig.open(1 + attempt, list(range(1, 31)))
        transfer.write([Span(0, 6, tuple(range(1, 31)), tuple(range(30)))])
        commit = asyncio.create_task(transfer.commit(b"", timeout_s=20))
        await asyncio.sleep(0.002 * attempt)  # at another moment each time; whichever it is, the fence must hold
        await rig.receiver.revoke(1 + attempt)
        rig.target.zero_()
        torch.cuda.synchronize()
        try:
            await commit  # it had been adopted
        except LeaseRevoked:
            pass
        torch.cuda.synchronize()
        assert not bytes_of(rig.target).any(), f"a late copy in attempt {attempt}"


def test_sums_of_layers_where_they_lie_are_those_of_the_cpu():
    pool = random_pool(5)
    copier, host = CudaCopier(pool, LAYOUT), bytes_of(pool)
    ids = np.random.default_rng(1).permutation(NUM_BLOCKS)[:20]
    words = host.reshape(NUM_BLOCKS, -1).view(np.uint64)
    assert (copier.sums(ids, 0, 6, copier.mark()).wait() == block_sums(host[ids])).all()
    layer_words = words.shape[1] // 6
    part = words[ids, 2 * layer_words : 5 * layer_words]
    found = copier.sums(ids, 2, 5, copier.mark()).wait()
    assert (found == partial_sums(part, 2 * layer_words, words.shape[1])).all()


def test_what_is_known_of_a_pool_is_what_the_driver_says():
    pool = CudaPool(random_pool(6), LAYOUT)
    driver = CudaDriver()
    facts = pool.facts()
    assert facts.device_type == "cuda"
    assert facts.dmabuf_exported == driver.supported(0)
    assert facts.writes_ordered == driver.orders_writes(0)
    assert pool.name == "cuda:0"
    if facts.dmabuf_exported:
        exported = pool.export()
        assert exported.length == NUM_BLOCKS * block_bytes(LAYOUT)
        exported.close()


def test_a_gpu_pool_says_where_it_is_on_the_pci_bus() -> None:
    pool = torch.zeros((3, *block_shape(LAYOUT)), dtype=torch.float32, device="cuda")
    address = CudaPool(pool, LAYOUT).pci_address()
    assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", address)
