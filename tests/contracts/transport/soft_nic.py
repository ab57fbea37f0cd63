"""An RDMA device that exists only in this process.

A dma-buf here is any file that can be mapped. As with ibv_reg_dmabuf_mr(3) and pyverbs, addresses in it start at the
offset that was registered, and no window can be bound on it. Memory that passes for a device's is refused.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from distserve.transport.rdma.device import Completion, PairOptions
from tests.contracts.transport.soft_keys import SoftRegion, SoftWindow
from tests.contracts.transport.soft_pair import SoftPair

if TYPE_CHECKING:
    from tests.contracts.transport.soft_fabric import SoftFabric


class SoftNic:
    """As device.Nic."""

    max_depth = 256

    def __init__(
        self, fabric: SoftFabric, index: int, has_windows: bool, mtu: int, registers_dmabufs: bool = True
    ) -> None:
        self.registers_dmabufs = registers_dmabufs
        self.fabric = fabric
        self.name = f"soft{index}:1"
        self.gid = f"0000:0000:0000:0000:0000:ffff:0a4d:{index:04x}"
        self.has_windows = has_windows
        self.mtu = mtu
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.keys: dict[int, SoftRegion | SoftWindow] = {}
        self._open: dict[str, set[object]] = {"pairs": set(), "regions": set(), "windows": set()}
        self._completions: deque[Completion] = deque()
        self._is_armed = False
        self._is_closed = False

    def register(self, address: int, length: int, *, remote_write: bool) -> SoftRegion:
        for start, stop in self.fabric.device_ranges:
            if address < stop and start < address + length:
                raise OSError(14, "that is a device's memory, not the host's")
        key = next(self.fabric.serial)
        return self._add(SoftRegion(self, address, length, remote_write, key, key, at=address))

    def register_dmabuf(self, fd: int, offset: int, length: int, *, remote_write: bool) -> SoftRegion:
        if not self.registers_dmabufs:
            raise OSError(95, "this device's driver registers no dma-buf")
        mapped = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        if offset + length > len(mapped):
            raise OSError(22, f"{length} bytes at {offset} of a dma-buf of {len(mapped)}")
        key, at = next(self.fabric.serial), int(mapped.ctypes.data) + offset
        return self._add(SoftRegion(self, offset, length, remote_write, key, key, at, takes_windows=False, keep=mapped))

    def _add(self, region: SoftRegion) -> SoftRegion:
        self._open["regions"].add(region)
        self.keys[region.rkey] = region
        return region

    def local(self, lkey: int, address: int, length: int) -> int | None:
        """Where that is in this process; None if the key does not open it."""
        region = self.keys.get(lkey)
        if not length:
            return 0
        return region.pointer(address) if isinstance(region, SoftRegion) and region.has(address, length) else None

    def window(self) -> SoftWindow:
        window = SoftWindow(self, next(self.fabric.serial))
        self._open["windows"].add(window)
        self.keys[window.rkey] = window
        return window

    def pair(self, options: PairOptions) -> SoftPair:
        pair = SoftPair(self, options, next(self.fabric.serial))
        with self.fabric.lock:
            self._open["pairs"].add(pair)
            self.fabric.pairs[self.gid, pair.qp_num] = pair
        return pair

    def poll(self, most: int = 64) -> list[Completion]:
        with self.fabric.lock:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                pass
            return [self._completions.popleft() for _ in range(min(most, len(self._completions)))]

    def arm(self) -> None:
        with self.fabric.lock:
            self._is_armed = True

    def counts(self) -> dict[str, int]:
        return {kind: len(objects) for kind, objects in self._open.items()}

    def close(self) -> None:
        with self.fabric.lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)
                for region in self.keys.values():
                    region.keep = None  # the map of a dma-buf

    def forget(self, kind: str, thing: object) -> None:
        self._open[kind].discard(thing)

    def complete(self, completion: Completion) -> None:
        self._completions.append(completion)
        if self._is_armed and not self._is_closed:
            self._is_armed = False
            os.eventfd_write(self.fd, 1)
