"""The pool's memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from distserve.engine.paged_cache import PagedCache
from distserve.errors import ConfigError
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout

LAYOUT = KVLayout(weights="w", dtype="bfloat16", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, rope="{}")


def test_views_share_the_pool_s_bytes() -> None:
    cache = PagedCache(LAYOUT, 5)
    assert cache.pool.shape == (5, 3, 2, 4, 2, 8)
    assert cache.pool.is_contiguous()
    assert cache.pool.data_ptr() % mmap.PAGESIZE == 0
    assert cache.memory is not None
    assert cache.memory.shape == (5, 3, layer_block_bytes(LAYOUT))
    assert cache.memory.nbytes == 5 * block_bytes(LAYOUT)
    assert not cache.memory.any()
    keys, values = cache.layer(1)
    assert keys.shape == values.shape == (5, 4, 2, 8)
    keys[4, 3, 1] = torch.arange(8, dtype=torch.bfloat16)
    values[4, 0, 0] = 1.0
    block = torch.from_numpy(cache.memory[4, 1].copy()).view(torch.bfloat16).view(2, 4, 2, 8)
    assert block[0, 3, 1].tolist() == list(range(8))
    assert (block[1, 0, 0] == 1).all()
    assert np.count_nonzero(cache.memory) == np.count_nonzero(cache.memory[4, 1])
    cache.clear([4])
    assert not cache.memory.any()
    cache.close()


def test_another_process_that_has_the_descriptor_sees_the_same_memory() -> None:
    cache = PagedCache(LAYOUT, 3)
    assert cache.fd is not None
    size = 3 * block_bytes(LAYOUT)
    code = (
        "import mmap, sys; m = mmap.mmap(int(sys.argv[1]), int(sys.argv[2])); "
        "assert m[0:2] == b'\\x80\\x3f'; m[-1] = 7"  # 1.0 in bfloat16
    )
    cache.pool.view(-1)[0] = 1.0
    subprocess.run([sys.executable, "-c", code, str(cache.fd), str(size)], pass_fds=[cache.fd], check=True, timeout=30)
    assert cache.memory is not None
    assert cache.memory.reshape(-1)[-1] == 7
    cache.close()


def test_the_descriptor_can_be_neither_resized_nor_inherited() -> None:
    cache = PagedCache(LAYOUT, 3)
    assert cache.fd is not None
    assert not os.get_inheritable(cache.fd)
    for size in (0, 100 * block_bytes(LAYOUT)):
        with pytest.raises(PermissionError):
            os.ftruncate(cache.fd, size)
    seals = fcntl.fcntl(cache.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_SEAL
    cache.close()


def test_closing_gives_up_the_descriptor_and_keeps_the_memory() -> None:
    cache = PagedCache(LAYOUT, 3)
    fd = cache.fd
    assert fd is not None
    cache.close()
    cache.close()
    assert cache.fd is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    cache.pool.fill_(2.0)
    assert float(cache.pool.sum()) == 2.0 * cache.pool.numel()


def test_a_pool_that_can_t_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks is 1, must be at least 2"):
        PagedCache(LAYOUT, 1)
    vast = msgspec.structs.replace(LAYOUT, num_layers=1_000_000, head_dim=1_000_000)
    with pytest.raises(ConfigError, match="can't map"):
        PagedCache(vast, 1_000_000)
