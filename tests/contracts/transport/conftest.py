"""One suite over every transport. A new kind joins with a factory in KINDS. rdma runs on devices of this process, or on
real ones where there are any.

A Rig is a sender's pool and a receiver's, wired up; every test ends with no thread and no descriptor left.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distserve.bus.base import Bus
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.bus.nats import NatsBus
from distserve.messages import KVLayout, RemoteRegion
from distserve.transport.base import Commit, Lease, OnLost, PoolMemory, Receiver, Sender, Span, Transfer
from distserve.transport.factory import make_receiver, make_sender, rdma_unusable
from distserve.transport.options import StreamOptions
from distserve.transport.rdma.halves import OpenNics, open_configured
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.receiver import RdmaReceiver
from distserve.transport.rdma.sender import RdmaSender
from tests.contracts.transport.fake_device import FakeDevice
from tests.contracts.transport.pools import OWN_MAPS, SMALL, descriptors, pool
from tests.contracts.transport.proxy import Proxy
from tests.contracts.transport.soft_fabric import SoftFabric
from tests.contracts.transport.wire import Wire
from tests.waiting import until

# "rdma-staged": pools that pass for a device's, which bytes have to be copied out of and into. "rdma-dmabuf": that do
# so too, and can be exported to the network card. "cuda_ipc": that another such device can read.
KINDS = ("shm", "tcp", "cuda_ipc", "rdma", "rdma-staged", "rdma-dmabuf")
SLOW = float(os.environ.get("DISTSERVE_TEST_SLOWNESS", "1"))  # of this machine: emulated ones take ten times as long
FAST = StreamOptions(
    connect_timeout_s=2 * SLOW, peer_timeout_s=2 * SLOW, abort_timeout_s=0.5 * SLOW, backoff_s=0.01, max_backoff_s=0.1
)
# Slots that most spans do not fit into.
RDMA = RdmaOptions(
    common=FAST, ping_s=0.3 * SLOW, progress_s=0.02, stage_slots=3, stage_slot_bytes=20_000, landing_bytes=16 << 20
)
NATS = os.environ.get("DISTSERVE_TEST_NATS", "")  # its URL; without it rdma is set up within this process
HAS_DEVICE = not rdma_unusable(RdmaOptions())
ROOT = Path(__file__).parents[3]


class Rig:
    """commits and losses are what the receiver's owner was told; losses are (lease_id, error). source and target are
    the pools' bytes, also of those that the transport is not shown: `devices`, the sender's and the receiver's."""

    def __init__(self, kind: str, stack: AsyncExitStack) -> None:
        """kind: of KINDS."""
        self.kind, _, self.path = kind.partition("-")  # path: "staged", "dmabuf" or none: pools in host memory
        self.heals = self.kind == "rdma"  # a broken connection is built anew under its transfers
        self.copies_first = kind in ("tcp", "rdma-staged")  # the sums are those of bytes that have left the source
        self.devices: list[FakeDevice] = []
        self.offset = 0x240 if self.path == "dmabuf" else 0  # of pools in their files
        self.landing_bytes, self.store_timeout_s = RDMA.landing_bytes, RDMA.store_timeout_s
        self.wire = Wire()
        self.num_nics, self.mtu = 1, 4096  # of devices of this process
        self.has_windows: bool | tuple[bool, ...] = True
        self.registers_dmabufs: bool | tuple[bool, ...] = True
        self._stack = stack
        self.commits: list[Commit] = []
        self.losses: list[tuple[int, Exception]] = []
        self.on_commit: Callable[[Commit], None] = self.commits.append
        self.on_lost: OnLost = lambda lease_id, epoch, e: self.losses.append((lease_id, e))
        self._next_lease = 1

    async def start(self, num_blocks: int = 64, layout: KVLayout = SMALL, options: StreamOptions = FAST) -> Rig:
        self.options = options
        self.source = self.add_pool(num_blocks, layout, seed=1)
        self.target = self.add_pool(num_blocks, layout)
        if self.kind == "rdma":
            await self._start_network()
        self.receiver = await self.add_receiver(self.target)
        self.sender = self.add_sender(self.source)
        return self

    async def _start_network(self) -> None:
        self.rdma = replace(RDMA, common=self.options, landing_bytes=self.landing_bytes)
        self.rdma = replace(self.rdma, store_timeout_s=self.store_timeout_s)
        self.open_nics: OpenNics = open_configured
        self.fabric: SoftFabric | None = None
        if not HAS_DEVICE:
            self.fabric = SoftFabric()
            self._stack.callback(self.fabric.close)
            self.open_nics = self.fabric.opener(
                self.num_nics,
                has_windows=self.has_windows,
                mtu=self.mtu,
                registers_dmabufs=self.registers_dmabufs,
            )
        self.hub = MemoryHub()
        self.sender_bus = await self.add_bus()

    async def add_bus(self) -> Bus:
        if NATS:
            return await self._stack.enter_async_context(await NatsBus.connect(NATS, name="rig"))
        return await self._stack.enter_async_context(MemoryBus(self.hub))

    def shown(self, memory: PoolMemory) -> PoolMemory:
        """The pool as the transport sees it."""
        if self.kind == "cuda_ipc":
            self.devices.append(device := FakeDevice(memory, shares=True))
            return PoolMemory(memory.layout, blocks=None, on_device=device)
        if not self.path:
            return memory
        device = FakeDevice(memory, exports=self.path == "dmabuf", offset=self.offset)
        self.devices.append(device)
        if self.fabric is not None:
            start = int(memory.blocks.ctypes.data)
            self.fabric.device_ranges.append((start, start + memory.blocks.nbytes))
        return PoolMemory(memory.layout, blocks=None, on_device=device)

    def arriving(self, block_id: int) -> np.ndarray:
        """A block's bytes as far as they have come, [num_layers, layer_block_bytes]: in the target, or in the landing
        while its lease is open."""
        if self.path == "staged":
            assert isinstance(self.receiver, RdmaReceiver)
            landing = self.receiver._devices.access.landing
            assert landing is not None
            for link in list(self.receiver._links._links.values()):
                for exposure in list(link._exposures.values()):
                    ids, place = exposure.lease.block_ids.tolist(), exposure.place
                    if block_id in ids and place is not None and len(place.ids):
                        blocks: np.ndarray = landing.memory.blocks
                        return blocks[place.ids[ids.index(block_id)]]
        return np.asarray(self.target.blocks[block_id])

    def has_come(self, block_id: int, layer: int) -> bool:
        return bool(self.arriving(block_id)[layer].any())

    def wipe(self) -> None:
        """Zeros in the target and wherever bytes land on their way to it. No lease may be open."""
        self.target.blocks[:] = 0
        if self.path == "staged":
            assert isinstance(self.receiver, RdmaReceiver)
            landing = self.receiver._devices.access.landing
            assert landing is not None
            landing.memory.blocks[:] = 0

    async def add_receiver(self, memory: PoolMemory, **where: object) -> Receiver:
        receiver: Receiver
        memory = self.shown(memory)
        if self.kind == "rdma":
            self.receiver_bus = await self.add_bus()
            receiver = RdmaReceiver(memory, self.receiver_bus, options=self.rdma, open_nics=self.open_nics, **where)  # type: ignore[arg-type]
        else:
            receiver = make_receiver(self.kind, memory, options=self.options, **where)  # type: ignore[arg-type]
        await receiver.start(lambda c: self.on_commit(c), lambda *lost: self.on_lost(*lost))
        self._stack.push_async_callback(receiver.stop)
        return receiver

    def add_sender(self, memory: PoolMemory, sender_id: str = "prefill-0") -> Sender:
        sender: Sender
        memory = self.shown(memory)
        if self.kind == "rdma":
            open_nics = self.wire.through(self.open_nics)
            sender = RdmaSender(memory, self.sender_bus, sender_id=sender_id, options=self.rdma, open_nics=open_nics)
        else:
            sender = make_sender(self.kind, memory, sender_id=sender_id, options=self.options)
        self._stack.push_async_callback(sender.stop)
        return sender

    def add_pool(self, num_blocks: int = 64, layout: KVLayout = SMALL, seed: int | None = None) -> PoolMemory:
        return self._stack.enter_context(pool(num_blocks, layout, seed=seed, offset=self.offset))

    async def cut_for_good(self, proxy: Proxy | Wire) -> None:
        """Connections that are open now end, and those that heal have nobody to be built anew with."""
        if self.heals:
            await self.receiver_bus.close()
        proxy.cut()

    def add_proxy(self, receiver: Receiver | None = None) -> Proxy | Wire:
        proxy: Proxy | Wire = self.wire if self.kind == "rdma" else Proxy((receiver or self.receiver).endpoint)
        self._stack.callback(proxy.close)
        return proxy

    def grant(self, block_ids: list[int], lease_id: int = 0, epoch: int = 1) -> RemoteRegion:
        if not lease_id:
            lease_id, self._next_lease = self._next_lease, self._next_lease + 1
        return self.receiver.grant(Lease(lease_id, epoch, block_ids, 10.0))

    async def open(self, region: RemoteRegion) -> Transfer:
        return await self.sender.open(region, timeout_s=5)

    def assert_arrived(self, sources: list[int], block_ids: list[int]) -> None:
        assert np.array_equal(self.target.blocks[block_ids], self.source.blocks[sources])

    async def lost(self, lease_id: int, timeout_s: float = 10) -> Exception:
        await until(
            lambda: any(i == lease_id for i, _ in self.losses), timeout_s * SLOW, f"the loss of lease {lease_id}"
        )
        return next(e for i, e in self.losses if i == lease_id)

    async def spawn(self, *args: str) -> asyncio.subprocess.Process:
        """tests.contracts.transport.peer_process as a process; killed at the end if it still runs."""
        if self.kind == "rdma" and not (HAS_DEVICE and NATS):
            pytest.skip("another process connects to a real device, over the server that DISTSERVE_TEST_NATS names")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.contracts.transport.peer_process",
            *args,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._stack.push_async_callback(_end, process)
        return process


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    async with asyncio.timeout(10):
        await process.communicate()


def everything(sources: list[int], num_layers: int = SMALL.num_layers) -> list[Span]:
    """Source block i to target i, all layers at once."""
    return [Span(0, num_layers, tuple(sources), tuple(range(len(sources))))]


async def commits_fine(rig: Rig, region: RemoteRegion, sources: list[int], block_ids: list[int]) -> None:
    transfer = await rig.open(region)
    transfer.write(everything(sources))
    await transfer.commit(b"", timeout_s=5)
    rig.assert_arrived(sources, block_ids)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    skip_where_devices_are_real(request)
    return str(request.param)


def skip_where_devices_are_real(request: pytest.FixtureRequest) -> None:
    """They take no file for a dma-buf. Emulated ones are slow: of staged pools they see healthy transfers only."""
    kind, where = str(request.param), request.node.path.stem
    if HAS_DEVICE and (kind == "rdma-dmabuf" or (kind == "rdma-staged" and where != "test_transport_transfers")):
        pytest.skip("for devices that this process makes up")


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def bare_rig(kind: str) -> AsyncIterator[Rig]:
    """Not started: for tests that choose sizes. Checks at the end that nothing is left."""
    threads, fds = _threads(), (descriptors() - OWN_MAPS)
    async with AsyncExitStack() as stack:
        yield Rig(kind, stack)
    await until(
        lambda: not (_threads() - threads),
        5,
        f"the end of every thread ({_threads() - threads})",
    )
    await until(
        lambda: not ((descriptors() - OWN_MAPS) - fds), 5, f"the end of descriptors {(descriptors() - OWN_MAPS) - fds}"
    )


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.name.startswith("asyncio_")}  # the loop's own pool is no leak


@pytest.fixture
async def rig(bare_rig: Rig) -> Rig:
    return await bare_rig.start()
