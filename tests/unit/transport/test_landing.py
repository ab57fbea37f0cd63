"""Leases that land in host memory and are stored in the device's pool before they are adopted."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.errors import ChecksumMismatch, ConfigError, KVError, LeaseRevoked, PoolExhausted, TransportError
from distserve.kv.checksum import block_sums
from distserve.kv.layout import layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory, Span
from distserve.transport.fence import Fence
from distserve.transport.landing import Landing
from distserve.transport.staging_ring import HostCopier, Staged, StagingRing
from tests.waiting import until

LAYOUT = KVLayout(weights="test", dtype="float32", num_layers=4, num_kv_heads=1, head_dim=2, block_size=4, rope="{}")
LAYER_BYTES = layer_block_bytes(LAYOUT)


def host_pool(num_blocks: int, seed: int | None = None) -> PoolMemory:
    shape = (num_blocks, LAYOUT.num_layers, LAYER_BYTES)
    if seed is None:
        return PoolMemory(LAYOUT, np.zeros(shape, np.uint8))
    return PoolMemory(LAYOUT, np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


class GatedCopier(HostCopier):
    """Stores when the test says so, or fails then."""

    def __init__(self, memory: PoolMemory) -> None:
        super().__init__(memory)
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.error: Exception | None = None

    def store(self, blocks, landed, block_ids):
        store, owner = super().store, self

        class Later:
            def wait(self):
                assert owner.gate.wait(10)
                if owner.error is not None:
                    raise owner.error
                return store(blocks, landed, block_ids).wait()

        self.begun.set()
        return Later()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_every_block_is_in_one_place_whatever_is_reserved_and_released(steps):
    landing = Landing(HostCopier(host_pool(4)), LAYOUT, 10)
    try:
        held: list[tuple[int, ...]] = []
        for take, number in steps:
            free = landing.num_free
            if take and number > free:
                with pytest.raises(PoolExhausted) as caught:
                    landing.reserve(number)
                assert (caught.value.wanted, caught.value.free, caught.value.total) == (number, free, 10)
            elif take:
                held.append(landing.reserve(number))
            elif held:
                ids = held.pop(number % len(held))
                landing.release(ids)
                if ids:
                    with pytest.raises(KVError, match="not reserved"):
                        landing.release(ids)
            landing.check()
            taken = [i for ids in held for i in ids]
            assert len(set(taken)) == len(taken)
            assert all(1 <= i <= 10 for i in taken)  # block 0 is nobody's
            assert landing.num_free == 10 - len(taken)
    finally:
        landing.close()


async def test_a_lease_goes_from_pool_to_pool_through_ring_and_landing():
    source, target = host_pool(12, seed=1), host_pool(12)
    landing = Landing(HostCopier(target), LAYOUT, 8)
    ring = StagingRing(HostCopier(source), LAYOUT, num_slots=2, slot_bytes=5 * LAYER_BYTES)  # cuts spans
    landed = landing.reserve(6)
    sums = np.zeros(6, np.uint64)
    placed = 0

    class Peer:
        """Places rows as RDMA writes do."""

        def staged(self, staged: Staged) -> None:
            nonlocal placed
            piece = staged.piece
            rows = ring.memory[staged.offset : staged.offset + staged.length]
            where = [landed[t] for t in piece.targets]
            height = piece.layer_stop - piece.layer_start
            landing.memory.blocks[where, piece.layer_start : piece.layer_stop] = rows.reshape(-1, height, LAYER_BYTES)
            sums[list(piece.targets)] += staged.sums
            placed += height * len(where)
            staged.release()

        def failed(self, error: Exception) -> None:
            raise error

    sources, block_ids = (3, 4, 9, 1, 11, 7), (2, 5, 4, 10, 1, 3)
    ring.submit([Span(0, 3, sources, tuple(range(6))), Span(3, 4, sources, tuple(range(6)))], Fence(), Peer())
    await until(lambda: placed == 24, what="every layer block")
    await landing.unstage(landed, block_ids, sums, Fence(), timeout_s=10)
    assert np.array_equal(target.blocks[list(block_ids)], source.blocks[list(sources)])
    others = sorted(set(range(12)) - set(block_ids))
    assert not target.blocks[others].any()
    assert landing.num_free == 8
    landing.check()
    ring.check()
    ring.close()
    landing.close()


async def test_bytes_that_are_not_those_sent_are_not_adopted():
    landing = Landing(HostCopier(host_pool(8)), LAYOUT, 4)
    landed = landing.reserve(3)
    landing.memory.blocks[list(landed)] = host_pool(3, seed=2).blocks
    sums = block_sums(landing.memory.blocks[list(landed)])
    landing.memory.blocks[landed[1], 2, 40] ^= 1  # after the sender has summed
    with pytest.raises(ChecksumMismatch) as caught:
        await landing.unstage(landed, (1, 2, 3), sums, Fence(), timeout_s=10)
    assert caught.value.block_index == 1
    assert landing.num_free == 4
    landing.close()


async def test_a_revoked_lease_is_stored_no_more_and_its_fence_waits_for_the_copy():
    target = host_pool(8)
    copier = GatedCopier(target)
    landing = Landing(copier, LAYOUT, 4)
    landed = landing.reserve(2)
    landing.memory.blocks[list(landed)] = 7
    fence = Fence()
    sums = block_sums(landing.memory.blocks[list(landed)])
    with pytest.raises(TransportError, match="did not take 2 blocks"):
        await landing.unstage(landed, (1, 2), sums, fence, timeout_s=0.05)
    assert landing.num_free == 2  # still being read
    landing.check()
    with pytest.raises(KVError, match="not reserved"):
        landing.release(landed)
    shut = asyncio.create_task(fence.shut())
    await asyncio.sleep(0.02)
    assert not shut.done()
    copier.gate.set()
    async with asyncio.timeout(10):
        await shut
    await until(lambda: landing.num_free == 4, what="the blocks' return")
    again = landing.reserve(1)
    with pytest.raises(LeaseRevoked):
        await landing.unstage(again, (3,), np.zeros(1, np.uint64), fence, timeout_s=1)
    assert not target.blocks[3].any()
    assert landing.num_free == 4
    landing.close()


@pytest.mark.parametrize("error", [RuntimeError("launch failure"), TransportError("illegal address")])
async def test_a_device_that_fails_gives_the_blocks_back(error: Exception):
    copier = GatedCopier(host_pool(8))
    copier.error = error
    copier.gate.set()
    landing = Landing(copier, LAYOUT, 2)
    landed, fence = landing.reserve(2), Fence()
    with pytest.raises(TransportError, match=str(error)):
        await landing.unstage(landed, (1, 2), np.zeros(2, np.uint64), fence, timeout_s=10)
    async with asyncio.timeout(10):
        await fence.shut()
    assert landing.num_free == 2
    landing.close()


async def test_closing_in_the_midst_of_a_store_leaves_nobody_in_the_fence():
    landing = Landing(HostCopier(host_pool(8)), LAYOUT, 2)
    landed, fence = landing.reserve(2), Fence()
    closing = threading.Thread(target=landing.close)

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *args, **options):
            closing.start()
            closing.join(0.2)  # it comes as far as it can
            return super().submit(*args, **options)

    landing._threads = Interrupted(1)
    sums = block_sums(landing.memory.blocks[list(landed)])
    await landing.unstage(landed, (1, 2), sums, fence, timeout_s=10)
    async with asyncio.timeout(10):
        await fence.shut()
    await asyncio.to_thread(closing.join, 10)
    assert not closing.is_alive()


async def test_what_makes_no_sense_is_refused_and_changes_nothing():
    landing = Landing(HostCopier(host_pool(8)), LAYOUT, 4)
    landed = landing.reserve(2)
    with pytest.raises(KVError, match="2 landed blocks, 1 "):
        await landing.unstage(landed, (1,), np.zeros(2, np.uint64), Fence(), timeout_s=1)
    with pytest.raises(KVError, match="twice"):
        landing.release((landed[0], landed[0]))
    with pytest.raises(KVError, match="block 4 is not reserved"):
        landing.release((landed[0], 4))
    landing.release(landed)
    landing.check()
    with pytest.raises(ConfigError, match="num_blocks"):
        Landing(HostCopier(host_pool(8)), LAYOUT, 0)
    fd = landing.memory.fd
    landing.close()
    landing.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(TransportError, match="closed"):
        await landing.unstage((), (), np.zeros(0, np.uint64), Fence(), timeout_s=1)


async def test_whoever_waits_for_room_is_told_whenever_blocks_come_back():
    copier = GatedCopier(host_pool(8))
    copier.gate.set()
    landing = Landing(copier, LAYOUT, 4)
    free: list[int] = []
    landing.on_room(lambda: free.append(landing.num_free))
    landing.release(landing.reserve(1))
    assert free == [4]
    landed, fence = landing.reserve(3), Fence()
    landing.memory.blocks[list(landed)] = 7
    await landing.unstage(landed, (1, 2, 3), block_sums(landing.memory.blocks[list(landed)]), fence, timeout_s=10)
    assert free == [4, 4]
    fence.close()
    with pytest.raises(LeaseRevoked):
        await landing.unstage(landing.reserve(2), (1, 2), np.zeros(2, np.uint64), fence, timeout_s=10)
    assert free == [4, 4, 4]
    landing.close()


async def test_a_device_that_is_stuck_keeps_the_landing_and_closing_says_so():
    copier = GatedCopier(host_pool(8))
    landing = Landing(copier, LAYOUT, 2)
    landed = landing.reserve(2)
    storing = asyncio.create_task(
        landing.unstage(landed, (1, 2), block_sums(landing.memory.blocks[list(landed)]), Fence(), timeout_s=10)
    )
    await until(copier.begun.is_set, what="the copy")
    with pytest.raises(TransportError, match=r"did not finish its copies within 0.01 s"):
        await asyncio.to_thread(landing.close, 0.01)
    assert landing.memory.fd is not None
    copier.gate.set()
    await storing
    await asyncio.to_thread(landing.close)
    assert landing.memory.fd is None
    assert not landing.memory.blocks.size
