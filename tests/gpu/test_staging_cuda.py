"""Staging, checksums and dma-buf export on a real GPU."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from distserve.errors import TransportUnavailable
from distserve.kv.checksum import block_sums, partial_sums
from distserve.kv.layout import block_bytes, block_shape
from distserve.messages import KVLayout
from distserve.transport.base import Span
from distserve.transport.fence import Fence
from distserve.transport.landing import Landing
from distserve.transport.rdma.dmabuf import CudaDriver, export
from distserve.transport.staging import CudaCopier, device_sums
from distserve.transport.staging_ring import Staged, StagingRing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LAYOUT = KVLayout(
    weights="test", dtype="bfloat16", num_layers=6, num_kv_heads=4, head_dim=32, block_size=16, rope="{}"
)  # 8 KiB a layer block, 48 KiB a block
NUM_BLOCKS = 40


def random_pool(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    size = NUM_BLOCKS * block_bytes(LAYOUT)
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=generator)
    return raw.view(torch.bfloat16).view(NUM_BLOCKS, *block_shape(LAYOUT))


def bytes_of(pool: torch.Tensor) -> np.ndarray:
    """uint8 [num_blocks, num_layers, layer_block_bytes]."""
    return pool.view(torch.uint8).reshape(NUM_BLOCKS, LAYOUT.num_layers, -1).cpu().numpy()


class Collected:
    """A sink that copies each piece out and gives the slot back at once."""

    def __init__(self, ring: StagingRing, num_blocks: int) -> None:
        self.blocks = np.zeros((num_blocks, LAYOUT.num_layers, block_bytes(LAYOUT) // LAYOUT.num_layers), np.uint8)
        self.sums = np.zeros(num_blocks, np.uint64)
        self.errors: list[Exception] = []
        self._ring = ring
        self._left = threading.Semaphore(0)

    def staged(self, staged: Staged) -> None:
        p = staged.piece
        raw = self._ring.memory[staged.offset : staged.offset + staged.length]
        height = p.layer_stop - p.layer_start
        self.blocks[list(p.targets), p.layer_start : p.layer_stop] = raw.reshape(len(p.targets), height, -1)
        self.sums[list(p.targets)] += staged.sums
        staged.release()
        self._left.release()

    def failed(self, error: Exception) -> None:
        self.errors.append(error)
        self._left.release()

    def wait(self, num_pieces: int) -> None:
        for _ in range(num_pieces):
            assert self._left.acquire(timeout=20)
        assert not self.errors


def test_the_gpu_sums_what_the_cpu_sums_bit_for_bit():
    pool = random_pool(0)
    rows = pool.view(torch.uint8).reshape(-1).view(torch.int64).view(NUM_BLOCKS, -1)
    host = rows.cpu().numpy().view(np.uint64)
    num_words = host.shape[1]
    for first, stop in ((0, num_words), (1024, 3072), (num_words - 8, num_words)):
        found = device_sums(rows[:, first:stop], first, num_words).cpu().numpy().view(np.uint64)
        assert (found == partial_sums(host[:, first:stop], first, num_words)).all()


def test_scattered_blocks_come_out_right_while_the_layers_are_still_being_computed():
    pool = random_pool(1)
    copier = CudaCopier(pool, LAYOUT)
    ring = StagingRing(copier, LAYOUT, num_slots=3, slot_bytes=100_000)
    try:
        sources = tuple(np.random.default_rng(0).permutation(NUM_BLOCKS)[:25].tolist())
        sink, targets = Collected(ring, 25), tuple(range(25))
        factors, num_pieces = torch.randn(6000, 6000, device="cuda"), 0
        for first, stop in ((0, 4), (4, 6)):
            product = factors
            for _ in range(6):  # what the layers wait for: still running when the spans are queued
                product = torch.tanh(product @ factors)
            bit = (product.sum() > 1e30).to(torch.bfloat16)  # 0, known only at the end
            pool[:, first:stop] = torch.full_like(pool[:, first:stop], 1.5 + first) + bit
            num_pieces += ring.submit([Span(first, stop, sources, targets)], Fence(), sink)
        sink.wait(num_pieces)
        assert np.array_equal(sink.blocks, bytes_of(pool)[list(sources)])
        assert (sink.sums == block_sums(sink.blocks)).all()
        ring.check()
        assert ring.num_free == 3
    finally:
        ring.close()


async def test_landed_blocks_are_stored_and_their_sums_are_those_of_the_pool():
    pool, wanted = random_pool(2), bytes_of(random_pool(3))
    before = bytes_of(pool).copy()
    landing = Landing(CudaCopier(pool, LAYOUT), LAYOUT, 20)
    try:
        landing.reserve(3)
        landed = landing.reserve(12)
        landing.memory.blocks[list(landed)] = wanted[:12]
        block_ids = (7, 8, 9, 30, 2, 1, 39, 20, 21, 22, 23, 4)
        await landing.unstage(landed, block_ids, block_sums(wanted[:12]), Fence(), timeout_s=20)
        after = bytes_of(pool)
        assert np.array_equal(after[list(block_ids)], wanted[:12])
        others = sorted(set(range(NUM_BLOCKS)) - set(block_ids))
        assert np.array_equal(after[others], before[others])
        landing.check()
    finally:
        landing.close()


def test_the_pool_is_exported_as_a_dmabuf_or_the_driver_says_why_not():
    pool = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
    driver = CudaDriver()
    assert driver.device_of(pool.data_ptr()) == pool.device.index
    if not driver.supported(pool.device.index):
        with pytest.raises(TransportUnavailable, match="exports no dma-buf"):
            export(pool.data_ptr(), pool.numel(), driver)
        return
    exported = export(pool.data_ptr(), pool.numel(), driver)
    try:
        assert os.lseek(exported.fd, 0, os.SEEK_END) >= exported.offset + pool.numel()
        assert "dmabuf" in os.readlink(f"/proc/self/fd/{exported.fd}")
    finally:
        exported.close()


def test_memory_that_is_not_a_gpus_is_not_exported():
    host = np.zeros(4096, np.uint8)
    with pytest.raises(TransportUnavailable, match="cuPointerGetAttribute"):
        export(host.ctypes.data, host.nbytes)
