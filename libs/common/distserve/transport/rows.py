"""A pool's bytes as rows of words and as byte ranges, for copies, checksums and vectored I/O."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from distserve.errors import KVError
from distserve.kv.checksum import WORD_BYTES, Words, partial_sums
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.spans import Ids, runs


class PoolRows:
    """Views on a pool; no bytes are copied. Raises KVError where the array does not fit the layout."""

    def __init__(self, blocks: npt.NDArray[np.uint8], layout: KVLayout) -> None:
        """blocks: uint8 [num_blocks, num_layers, layer_block_bytes], contiguous."""
        self.layer_bytes = layer_block_bytes(layout)
        self.block_bytes = block_bytes(layout)
        expected = (blocks.shape[0], layout.num_layers, self.layer_bytes)
        if blocks.shape != expected or blocks.dtype != np.uint8 or not blocks.flags.c_contiguous:
            raise KVError(
                f"the pool is {blocks.dtype} {blocks.shape}, must be contiguous uint8 {expected}",
                shape=str(blocks.shape),
                expected=str(expected),
            )
        if self.layer_bytes % WORD_BYTES:
            raise KVError(
                f"a layer block has {self.layer_bytes} bytes, must be a multiple of {WORD_BYTES}: raise block_size",
                layer_block_bytes=self.layer_bytes,
                expected=f"multiple of {WORD_BYTES}",
            )
        self.num_blocks = blocks.shape[0]
        self.num_layers = layout.num_layers
        self.words: npt.NDArray[np.uint64] = blocks.view(np.uint64)  # [num_blocks, num_layers, layer_words]
        self.num_words = self.block_bytes // WORD_BYTES
        self._flat: memoryview = blocks.reshape(-1).data

    def ranges(self, ids: Ids, layer_start: int, layer_stop: int) -> list[memoryview]:
        """The bytes of some layers of some blocks, in order, neighbours joined: what sendmsg and recvmsg take."""
        height = (layer_stop - layer_start) * self.layer_bytes
        if layer_stop - layer_start == self.num_layers:
            return [self._flat[int(ids[i]) * height : (int(ids[i]) + length) * height] for i, length in runs(ids)]
        first = layer_start * self.layer_bytes
        flat, size = self._flat, self.block_bytes
        return [flat[i * size + first : i * size + first + height] for i in ids.tolist()]

    def sums(self, first: int, count: int, layer_start: int, layer_stop: int) -> Words:
        """What these layers of blocks first .. first+count-1 add to each block's checksum. uint64 [count]."""
        part = self.words[first : first + count, layer_start:layer_stop].reshape(count, -1)
        return partial_sums(part, layer_start * self.layer_bytes // WORD_BYTES, self.num_words)

    def sums_of(self, ids: Ids, layer_start: int, layer_stop: int) -> Words:
        """As sums(), for any list of blocks. uint64 [len(ids)]."""
        out = np.empty(len(ids), np.uint64)
        for i, length in runs(ids):
            out[i : i + length] = self.sums(int(ids[i]), length, layer_start, layer_stop)
        return out
