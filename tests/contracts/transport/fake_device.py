"""Pools that pass for a device's: the transport is given no bytes of theirs, only a copier that copies and sums, and,
where the device exports, a file that a soft NIC takes for a dma-buf."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

from distserve.errors import TransportUnavailable
from distserve.transport.base import PoolMemory, Span
from distserve.transport.rdma.dmabuf import Export, Facts
from distserve.transport.staging_ring import Bytes, Copier, Copy, HostCopier


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


def _check(after: object) -> None:
    """It must be a mark, and of the thread that computes, whose work is to be waited for: not of the transport's."""
    assert isinstance(after, str)
    assert not after.startswith("kv-send"), "a copy that does not wait for what the device was given before"


class FakeDevice:
    """device_pool.DevicePool. fetching, storing: held by tests; fetched, stored: the copies made, in their order."""

    name = "fake:0"

    def __init__(self, memory: PoolMemory, *, exports: bool, offset: int = 0) -> None:
        """offset: of the pool in memory's file."""
        self.num_blocks = memory.num_blocks
        self.fetching, self.storing = Gate(), Gate()
        self.fetched: list[Span] = []
        self.stored: list[tuple[int, ...]] = []
        self._memory = memory
        self._exports = exports
        self._offset = offset

    def pci_address(self) -> str:
        return "0000:1b:00.0"

    def facts(self) -> Facts:
        return Facts("cuda", dmabuf_exported=self._exports, writes_ordered=True)

    def export(self) -> Export:
        if not self._exports or self._memory.fd is None:
            raise TransportUnavailable("this device exports nothing")
        return Export(os.dup(self._memory.fd), self._offset, self._memory.blocks.nbytes)

    def copier(self) -> Copier:
        return DeviceCopier(self, self._memory)
