"""Pools that pass for a device's: the transport is given no bytes of theirs, only a copier that copies and sums, and,
where the device exports, a file that a soft NIC takes for a dma-buf, or, where it shares, one that another such device
maps."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from distserve.errors import TransportError, TransportUnavailable
from distserve.kv.layout import block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory, Span
from distserve.transport.device_pool import Attached
from distserve.transport.rdma.dmabuf import Export, Facts
from distserve.transport.spans import Ids
from distserve.transport.staging_ring import Bytes, Copy, HostCopier


class Gate:
    """Open, unless a test holds it: then copies wait, as on a device that is busy."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.num_waiting = 0
        self._lock = threading.Lock()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        with self._lock:
            self.num_waiting += 1
        try:
            assert self._open.wait(30), "a test held a copy and forgot it"
        finally:
            with self._lock:
                self.num_waiting -= 1


class _Later:
    def __init__(self, gate: Gate, copy: Callable[[], Copy]) -> None:
        self._gate = gate
        self._copy = copy

    def wait(self) -> np.ndarray:
        self._gate.pass_through()
        return self._copy().wait()


class DeviceCopier(HostCopier):
    """The copies are made when they are waited for, as if the device had taken that long."""

    def __init__(self, device: FakeDevice, memory: PoolMemory) -> None:
        super().__init__(memory)
        self._device = device

    def fetch(self, piece: Span, rows: Bytes, after: object) -> Copy:
        _check(after)
        fetch = super().fetch

        def copy() -> Copy:
            self._device.fetched.append(piece)
            return fetch(piece, rows, after)

        return _Later(self._device.fetching, copy)

    def store(self, blocks: Bytes, landed: Sequence[int], block_ids: Sequence[int]) -> Copy:
        store = super().store

        def copy() -> Copy:
            self._device.stored.append(tuple(block_ids))
            return store(blocks, landed, block_ids)

        return _Later(self._device.storing, copy)

    def sums(self, block_ids: np.ndarray, layer_start: int, layer_stop: int, after: object) -> Copy:
        _check(after)
        sums = super().sums
        return _Later(self._device.fetching, lambda: sums(block_ids, layer_start, layer_stop, after))

    def mark(self) -> object:
        return threading.current_thread().name

    def await_mark(self, mark: object) -> None:
        _check(mark)
        self._device.fetching.pass_through()

    def take(self, source: Attached, sources: Ids, targets: Ids, layer_start: int, layer_stop: int) -> Copy:
        assert isinstance(source, AttachedFile)
        sums = super().sums

        def copy() -> Copy:
            self._device.stored.append(tuple(targets.tolist()))
            self._pool[targets, layer_start:layer_stop] = source.blocks[sources, layer_start:layer_stop]
            return sums(targets, layer_start, layer_stop, None)

        return _Later(self._device.storing, copy)


def _check(after: object) -> None:
    """It must be a mark, and of the thread that computes, whose work is to be waited for: not of the transport's."""
    assert isinstance(after, str)
    assert not after.startswith("kv-send"), "a copy that does not wait for what the device was given before"


class AttachedFile:
    """device_pool.Attached: another process's memfd, mapped."""

    def __init__(self, shared: bytes, layout: KVLayout, num_blocks: int) -> None:
        pid, fd, size = msgspec.msgpack.decode(shared, type=tuple[int, int, int])
        if size != num_blocks * block_bytes(layout):
            raise TransportError(f"{size} bytes were shared, must be {num_blocks} blocks")
        with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
            self._map = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)
        self.num_blocks = num_blocks
        self.blocks: Bytes = np.frombuffer(self._map, np.uint8).reshape(num_blocks, layout.num_layers, -1)

    def close(self) -> None:
        self.blocks = self.blocks[:0].copy()
        self._map.close()


class FakeDevice:
    """device_pool.DevicePool. fetching, storing: held by tests; fetched, stored: the copies made, in their order."""

    name = "fake:0"

    def __init__(self, memory: PoolMemory, *, exports: bool = False, shares: bool = False, offset: int = 0) -> None:
        """offset: of the pool in memory's file."""
        self.num_blocks = memory.num_blocks
        self.fetching, self.storing = Gate(), Gate()
        self.fetched: list[Span] = []
        self.stored: list[tuple[int, ...]] = []
        self._memory = memory
        self._exports = exports
        self._shares = shares
        self._offset = offset

    def pci_address(self) -> str:
        return "0000:1b:00.0"

    def facts(self) -> Facts:
        return Facts("cuda", dmabuf_exported=self._exports, writes_ordered=True)

    def export(self) -> Export:
        if not self._exports or self._memory.fd is None:
            raise TransportUnavailable("this device exports nothing")
        return Export(os.dup(self._memory.fd), self._offset, self._memory.blocks.nbytes)

    def copier(self) -> DeviceCopier:
        return DeviceCopier(self, self._memory)

    def share(self) -> bytes:
        if not self._shares or self._memory.fd is None:
            raise TransportUnavailable("this device shares nothing")
        return msgspec.msgpack.encode((os.getpid(), self._memory.fd, self._memory.blocks.nbytes))

    def attach(self, shared: bytes, num_blocks: int) -> Attached:
        return AttachedFile(shared, self._memory.layout, num_blocks)
