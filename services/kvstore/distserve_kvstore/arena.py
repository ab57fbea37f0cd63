"""The node's memory for blocks: a pool that transports read and write, and which of its rows are free."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from distserve.errors import ConfigError, KVError, PoolExhausted
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.kv.memory import map_memory
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory

PAGE_BYTES = 4096
_WINDOW = 8192  # rows that are looked at in one step of an allocation
FIRST_BLOCK = 1  # transports take no lease on block 0, where engines' pools keep their padding


class Arena:
    """Rows 1 … num_blocks of one block each (row 0 is never touched), in an anonymous file that shm can pass on. Block
    i begins at i * block_bytes of memory that is page aligned, so that where a block is a multiple of PAGE_BYTES direct
    I/O reads straight into it.

    A row is free or has one owner: an open lease, a stale slot, an entry of the index, or an I/O job. Rows are taken in
    ascending order from a cursor that goes round, so that what comes together lies together as far as it can and a
    transfer of it is one copy. Physical memory is taken as rows are first written. Belongs to the event loop; threads
    touch only rows that they were given.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        """Raises ConfigError if it can't be had."""
        if num_blocks < 1:
            raise ConfigError(
                f"kvstore.dram_bytes holds {num_blocks} blocks of {block_bytes(layout)} bytes, must hold at least 1",
                key="kvstore.dram_bytes",
                value=num_blocks * block_bytes(layout),
                expected=f">= {block_bytes(layout)}",
            )
        self.layout = layout
        self.block_bytes = block_bytes(layout)
        num_rows = FIRST_BLOCK + num_blocks
        self._fd, mapped = map_memory(num_rows * self.block_bytes, what="the store's blocks", key="kvstore.dram_bytes")
        flat = np.frombuffer(mapped, np.uint8)
        self._rows: npt.NDArray[np.uint8] = flat.reshape(num_rows, self.block_bytes)
        self.memory = PoolMemory(layout, flat.reshape(num_rows, layout.num_layers, layer_block_bytes(layout)), self._fd)
        self._free = np.ones(num_rows, np.bool_)
        self._free[:FIRST_BLOCK] = False
        self._num_free = num_blocks
        self._cursor = 0

    @property
    def num_blocks(self) -> int:
        return len(self._free) - FIRST_BLOCK

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    def row(self, block: int) -> memoryview:
        """The bytes of a block, writable. uint8 [block_bytes]."""
        row: memoryview = self._rows[block].data
        return row

    def allocate(self, n: int) -> list[int]:
        """`n` rows, or PoolExhausted (fields wanted, free, total) and nothing changes."""
        if n > self._num_free:
            raise PoolExhausted(
                f"{n} blocks wanted, {self._num_free} of {self.num_blocks} are free",
                wanted=n,
                free=self._num_free,
                total=self.num_blocks,
            )
        taken: list[int] = []
        while len(taken) < n:
            stop = min(self._cursor + _WINDOW, len(self._free))
            found = self._cursor + np.flatnonzero(self._free[self._cursor : stop])[: n - len(taken)]
            self._free[found] = False
            taken.extend(found.tolist())
            self._cursor = 0 if stop == len(self._free) else stop
            if len(taken) == n and n:
                self._cursor = (taken[-1] + 1) % len(self._free)
        self._num_free -= n
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give rows back. KVError, and nothing changes, if one is free or named twice."""
        ids = np.fromiter(blocks, np.int64)
        if not len(ids):
            return
        if (
            ids.min() < FIRST_BLOCK
            or ids.max() >= len(self._free)
            or self._free[ids].any()
            or len(np.unique(ids)) < len(ids)
        ):
            raise KVError("a block of the arena is freed twice, or is none of its blocks", blocks=str(ids[:8]))
        self._free[ids] = True
        self._num_free += len(ids)

    def check(self) -> None:
        """Raises KVError if the count of free rows is not that of the map."""
        if int(self._free.sum()) != self._num_free:
            raise KVError("the arena's count of free blocks is wrong", counted=int(self._free.sum()))

    def close(self) -> None:
        """Close the descriptor. Idempotent. The memory goes with its last view."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
