"""A pool's bytes as rows of words and as byte ranges, for copies, checksums and vectored I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from distserve.errors import KVError
from distserve.kv.checksum import (
    SHORT_LINE_WORDS,
    WORD_BYTES,
    Words,
    line_sums,
    line_weights,
    line_words,
    partial_sums,
)
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.spans import Ids, runs

SHORT_RUN_BYTES = 32 << 10  # a mean run below this costs more in calls than its blocks cost in gathering
GATHER_BYTES = 256 << 10  # gathered at a time: stays in cache


def short_runs(num_bytes: int, num_runs: int) -> bool:
    """Whether blocks are better gathered than walked run by run."""
    return num_bytes < num_runs * SHORT_RUN_BYTES and num_runs > 1


class PoolShape:
    """The sizes of a pool, wherever it lies. Raises KVError for a layout whose layers cannot be summed."""

    def __init__(self, num_blocks: int, layout: KVLayout) -> None:
        self.num_blocks = num_blocks
        self.num_layers = layout.num_layers
        self.layer_bytes = layer_block_bytes(layout)
        self.block_bytes = block_bytes(layout)
        self.num_words = self.block_bytes // WORD_BYTES
        if self.layer_bytes % WORD_BYTES:
            raise KVError(
                f"a layer block has {self.layer_bytes} bytes, must be a multiple of {WORD_BYTES}: raise block_size",
                layer_block_bytes=self.layer_bytes,
                expected=f"multiple of {WORD_BYTES}",
            )


class SummedRows(PoolShape, ABC):
    """A pool whose blocks' checksums can be made where they lie."""

    @abstractmethod
    def sums(self, first: int, count: int, layer_start: int, layer_stop: int) -> Words:
        """What these layers of blocks first .. first+count-1 add to each block's checksum. uint64 [count]."""

    @abstractmethod
    def sums_of(self, ids: Ids, layer_start: int, layer_stop: int) -> Words:
        """As sums(), for any list of blocks. uint64 [len(ids)]."""


class PoolRows(SummedRows):
    """Views on a pool in host memory; no bytes are copied. Raises KVError where the array does not fit the layout."""

    def __init__(self, blocks: npt.NDArray[np.uint8], layout: KVLayout) -> None:
        """blocks: uint8 [num_blocks, num_layers, layer_block_bytes], contiguous."""
        super().__init__(blocks.shape[0], layout)
        expected = (blocks.shape[0], layout.num_layers, self.layer_bytes)
        if blocks.shape != expected or blocks.dtype != np.uint8 or not blocks.flags.c_contiguous:
            raise KVError(
                f"the pool is {blocks.dtype} {blocks.shape}, must be contiguous uint8 {expected}",
                shape=str(blocks.shape),
                expected=str(expected),
            )
        self.words: npt.NDArray[np.uint64] = blocks.view(np.uint64)  # [num_blocks, num_layers, layer_words]
        self._line_weights = line_weights(self.num_words)
        line, layer_words = line_words(self.num_words), self.layer_bytes // WORD_BYTES
        # [num_blocks, num_lines, line], if each layer has whole lines that are worth a call
        self._lines: npt.NDArray[np.uint64] | None = None
        if line >= SHORT_LINE_WORDS and not layer_words % line:
            self._lines = self.words.reshape(self.num_blocks, -1, line)
        self._lines_a_layer = layer_words // line
        self._flat: memoryview = blocks.reshape(-1).data

    def ranges(self, first: int, count: int, layer_start: int, layer_stop: int) -> list[memoryview]:
        """The bytes of some layers of blocks first .. first+count-1, in order, neighbours joined: what sendmsg and
        recvmsg take."""
        flat, size = self._flat, self.block_bytes
        if layer_stop - layer_start == self.num_layers:
            return [flat[first * size : (first + count) * size]]
        start, stop = layer_start * self.layer_bytes, layer_stop * self.layer_bytes
        return [flat[i * size + start : i * size + stop] for i in range(first, first + count)]

    def sums(self, first: int, count: int, layer_start: int, layer_stop: int) -> Words:
        if self._lines is not None:
            a, b = layer_start * self._lines_a_layer, layer_stop * self._lines_a_layer
            return line_sums(self._lines[first : first + count, a:b], self._line_weights[a:b])
        part = self.words[first : first + count, layer_start:layer_stop].reshape(count, -1)
        return partial_sums(part, layer_start * self.layer_bytes // WORD_BYTES, self.num_words)

    def sums_of(self, ids: Ids, layer_start: int, layer_stop: int) -> Words:
        out = np.empty(len(ids), np.uint64)
        height = (layer_stop - layer_start) * self.layer_bytes
        stretches = list(runs(ids))
        if short_runs(len(ids) * height, len(stretches)):
            step = max(1, GATHER_BYTES // height)
            for i in range(0, len(ids), step):
                part = self.words[ids[i : i + step], layer_start:layer_stop]
                out[i : i + step] = partial_sums(
                    part.reshape(len(part), -1), layer_start * self.layer_bytes // WORD_BYTES, self.num_words
                )
            return out
        for i, length in stretches:
            out[i : i + length] = self.sums(int(ids[i]), length, layer_start, layer_stop)
        return out
