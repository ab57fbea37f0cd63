"""The KV pool: memory, and the views of it that attention and transports use. Who owns which block is not known here.

On the CPU the pool lies in an anonymous file (memfd_create(2)): a process that gets its descriptor over a Unix socket
can map the very same memory, and nothing is left behind when the processes die, however they die. Physical memory is
taken as blocks are first written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from distserve.errors import ConfigError
from distserve.kv.layout import block_bytes, block_shape, layer_block_bytes
from distserve.kv.memory import map_memory
from distserve.messages import KVLayout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class PagedCache:
    """A pool of `num_blocks` blocks. Block 0 is never allocated: padding writes go there.

    pool: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], zero at the start.
    memory: the same bytes as numpy uint8 [num_blocks, num_layers, layer_block_bytes]; None off the CPU.
    fd: the descriptor of the memory, sealed against resizing; None off the CPU and where the system has no memfd.

    The memory lives as long as `pool` or `memory` is referenced; `close()` gives up only the descriptor.
    """

    pool: torch.Tensor
    memory: npt.NDArray[np.uint8] | None
    fd: int | None

    def __init__(self, layout: KVLayout, num_blocks: int, device: str | torch.device = "cpu") -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks is {num_blocks}, must be at least 2: block 0 is never allocated",
                key="num_blocks",
                value=num_blocks,
                expected=">= 2",
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        self.device = torch.device(device)
        shape = (num_blocks, *block_shape(layout))
        dtype = DTYPES[layout.dtype]
        self.fd = None
        self.memory = None
        if self.device.type == "cpu":
            self.fd, mapped = map_memory(num_blocks * block_bytes(layout), what="the KV pool", key="kv.num_blocks")
            self.pool = torch.frombuffer(mapped, dtype=dtype).view(shape)
            self.memory = np.frombuffer(mapped, dtype=np.uint8).reshape(
                num_blocks, layout.num_layers, layer_block_bytes(layout)
            )
        else:
            self.pool = torch.zeros(shape, dtype=dtype, device=self.device)
        self._layers = [(self.pool[:, n, 0], self.pool[:, n, 1]) for n in range(layout.num_layers)]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer: strided views, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._layers[layer]

    def clear(self, block_ids: Iterable[int]) -> None:
        """Zero whole blocks, in all layers."""
        for block_id in block_ids:
            self.pool[block_id].zero_()

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
