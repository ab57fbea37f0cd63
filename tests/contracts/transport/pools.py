"""Real pools in memfds, as an engine makes them, filled with reproducible bytes."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np

from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory

SMALL = KVLayout(
    weights="test", dtype="float32", num_layers=4, num_kv_heads=2, head_dim=8, block_size=16, rope="{}"
)  # 2 KiB a layer block, 8 KiB a block

# Python's maps hold a descriptor of their own for as long as an array is on them, e.g. in a traceback that a test has
# kept: (descriptor, name) of each, so that they can be told from leaks.
OWN_MAPS: set[tuple[str, str]] = set()
_serial = count()


@contextmanager
def pool(
    num_blocks: int, layout: KVLayout = SMALL, *, seed: int | None = None, offset: int = 0
) -> Iterator[PoolMemory]:
    """Zeros, or with a seed random bytes. Nothing is left behind when the process dies. offset: of the pool in its
    file."""
    size = offset + num_blocks * block_bytes(layout)
    name = f"kv-test-{next(_serial)}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    region = mmap.mmap(fd, size)
    OWN_MAPS.update((held, link) for held, link in descriptors() if name in link and held != str(fd))
    blocks = np.frombuffer(region, np.uint8, offset=offset).reshape(
        num_blocks, layout.num_layers, layer_block_bytes(layout)
    )
    if seed is not None:
        blocks.reshape(-1)[:] = np.random.default_rng(seed).integers(0, 256, blocks.size, dtype=np.uint8)
    try:
        yield PoolMemory(layout=layout, blocks=blocks, fd=fd)
    finally:
        os.close(fd)  # the map goes with the last array on it


def descriptors() -> set[tuple[str, str]]:
    """This process's open files, as (descriptor, what it is)."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        except FileNotFoundError:
            pass  # the listing's own
    return found
