"""Registered memory for the messages of one control lane: some slots to send from, some to receive into."""

from __future__ import annotations

import mmap

import numpy as np

from distserve.transport.rdma.device import Nic, Region

MESSAGE_BYTES = 4096
NUM_SENDS = 32
NUM_RECEIVES = 64


class MessageBuffers:
    """Owned by its lane's link. close() only after the pair is closed."""

    def __init__(self, nic: Nic, depth: int) -> None:
        """depth: of the pair's queues. Raises OSError."""
        self.num_receives = min(NUM_RECEIVES, depth)
        size = (NUM_SENDS + self.num_receives) * MESSAGE_BYTES
        self._map = mmap.mmap(-1, size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._address = int(self._bytes.ctypes.data)
        self._region: Region = nic.register(self._address, size, remote_write=False)
        self.lkey = self._region.lkey
        self.free = list(range(NUM_SENDS))  # slots to send from

    def fill(self, slot: int, data: memoryview) -> int:
        """Puts a message into a send slot; its address."""
        start = slot * MESSAGE_BYTES
        self._bytes[start : start + len(data)] = np.frombuffer(data, np.uint8)
        return self._address + start

    def receive_address(self, slot: int) -> int:
        return self._address + (NUM_SENDS + slot) * MESSAGE_BYTES

    def received(self, slot: int, num_bytes: int) -> memoryview:
        """What came into a receive slot: to be used before that slot is posted again."""
        start = (NUM_SENDS + slot) * MESSAGE_BYTES
        return self._bytes[start : start + num_bytes].data

    def close(self) -> None:
        self._region.close()
