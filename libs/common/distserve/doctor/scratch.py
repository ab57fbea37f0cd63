"""The pools that `doctor --peer` and `doctor --serve` move bytes between: small ones, of no model."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory


@dataclass(frozen=True, slots=True)
class Scratch:
    """A pool's shape. Block 0 is left alone, as in every pool."""

    layout: KVLayout
    num_blocks: int

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.layout)


def _layout(num_layers: int, num_kv_heads: int) -> KVLayout:
    return KVLayout(
        weights="doctor",
        dtype="bfloat16",
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        block_size=16,
        rope="",
    )


POOLS = {
    "small": Scratch(_layout(num_layers=1, num_kv_heads=1), 128),  # blocks of 4 KiB
    "large": Scratch(_layout(num_layers=16, num_kv_heads=4), 257),  # blocks of 256 KiB, 64 MiB in all
}


@contextmanager
def scratch_pool(name: str) -> Iterator[PoolMemory]:
    """A sealed memfd like a worker's, every page touched. Gone with the process, whatever happens."""
    scratch = POOLS[name]
    size = scratch.num_blocks * scratch.block_bytes
    fd = os.memfd_create(f"distserve-doctor-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        flat = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        flat.view(np.uint64)[:] = np.arange(size // 8, dtype=np.uint64)
        shape = (scratch.num_blocks, scratch.layout.num_layers, layer_block_bytes(scratch.layout))
        yield PoolMemory(layout=scratch.layout, blocks=flat.reshape(shape), fd=fd)
    finally:
        os.close(fd)  # the map goes with the last array on it
