"""A worker's pool, with what is put and room for what is got."""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

import numpy as np

from benchmarks.store_bytes import Bytes
from benchmarks.store_values import BLOCK_SIZE, Load, Size
from distserve.kv.block_pool import BlockPool
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory


def layout_of(size: Size, model: str) -> KVLayout:
    """The model's name is in it: a node of another model has nothing for us."""
    return KVLayout(
        weights=model,
        dtype="bfloat16",
        num_layers=size.num_layers,
        num_kv_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        block_size=BLOCK_SIZE,
        rope="",
    )


def pool_memory(layout: KVLayout, num_blocks: int) -> PoolMemory:
    """In a memfd, as the engine's. It lives as long as this process."""
    fd = os.memfd_create("kv-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_blocks * block_bytes(layout))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    region = mmap.mmap(fd, num_blocks * block_bytes(layout))
    blocks = np.frombuffer(region, np.uint8).reshape(num_blocks, layout.num_layers, layer_block_bytes(layout))
    return PoolMemory(layout=layout, blocks=blocks, fd=fd)


@dataclass(slots=True)
class Blocks:
    """Of our pool: what is put, and where to what is got goes. Held for good."""

    memory: PoolMemory
    pool: BlockPool
    sources: list[int]
    targets: list[int]
    bytes: Bytes

    @classmethod
    def of(cls, load: Load, layout: KVLayout) -> Blocks:
        n = load.num_values
        memory, pool = pool_memory(layout, 1 + 2 * n), BlockPool(1 + 2 * n)
        values = memory.blocks.reshape(-1)[load.size.value_bytes :]  # block 0 is for padding
        return cls(memory, pool, pool.allocate(n), pool.allocate(n), Bytes(load, values))
