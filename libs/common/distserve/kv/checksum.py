"""One checksum per block, computed where the bytes lie.

    sum(block) = Σ weight(i) · word(i)  mod 2^64,    weight(i) = splitmix64(i div line) | 1

over the full block's little-endian uint64 words, i counting from the block's first word. The words of a line share a
weight; a line is the power of two that makes 16 to 31 lines a block, 512 words (4 KiB) at most. Being a sum it is
additive over layers: sums of parts add up, whatever the order they are made in, so both sides compute it span by span
while the bytes are still in cache. A line's words are only added, with one multiplication a line: processors without
a 64-bit vector multiply (AVX2) add twice as fast, and a GPU may multiply each word, which comes to the same.

What it sees: any single changed word (an odd weight is invertible mod 2^64); and, but for one case in 2^63 or so,
lines or blocks in the wrong place, layers in the wrong place (where a layer block is at least a line), stale or torn
bytes. Its known blind spots: words that change places within a line, which no transport here does unless layer blocks
are smaller than a line, since each moves runs of whole layer blocks; and two lines swapped whose sums differ only in
their top k bits go unseen with probability 2^(1-k), since a difference of odd weights is even. It
guards one copy against faults of the transfer, not against forgery; splitmix64 is Steele, Lea, Flood, "Fast
splittable pseudorandom number generators" (OOPSLA 2014), as finalised by Vigna.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

WORD_BYTES = 8
MIN_LINES = 16  # a block, if it has as many words
MAX_LINE_WORDS = 512
SHORT_LINE_WORDS = 128  # below this a call a line costs more than a multiplication a word
Words: TypeAlias = npt.NDArray[np.uint64]


@lru_cache(maxsize=8)
def weights(num_words: int) -> Words:
    """Of the words [0, num_words) of a block; read-only."""
    line = line_words(num_words)
    return _frozen(np.repeat(line_weights(num_words), line)[:num_words])


def line_words(num_words: int) -> int:
    """Words in a line of a block of num_words words."""
    return min(MAX_LINE_WORDS, 1 << max(0, (num_words // MIN_LINES).bit_length() - 1))


@lru_cache(maxsize=8)
def line_weights(num_words: int) -> Words:
    """Of each line of a block of num_words words, the last one cut or not: splitmix64(i) | 1; read-only."""
    num_lines = -(-num_words // line_words(num_words))
    z = (np.arange(num_lines, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return _frozen((z ^ (z >> np.uint64(31))) | np.uint64(1))


def _frozen(words: Words) -> Words:
    words.flags.writeable = False
    return words


def partial_sums(rows: Words, first_word: int, num_words: int) -> Words:
    """What words [first_word, first_word + k) of blocks of `num_words` words add to each block's checksum.

    rows: uint64 [n, k], those words of n blocks; rows may be strided. Returns uint64 [n]. One pass over the bytes, in
    which the GIL is released.
    """
    num_blocks, count = rows.shape
    line = line_words(num_words)
    sums: Words
    if line < SHORT_LINE_WORDS or first_word % line or count % line:
        # einsum, because numpy's matmul on integers holds the GIL.
        sums = np.einsum("bw,w->b", rows, weights(num_words)[first_word : first_word + count])
        return sums
    first, num_lines = first_word // line, count // line
    return line_sums(rows.reshape(num_blocks, num_lines, line), line_weights(num_words)[first : first + num_lines])


def line_sums(lines: Words, weights_of_lines: Words) -> Words:
    """As partial_sums, where lines are whole. lines: uint64 [n, num_lines, line_words], weights_of_lines: uint64
    [num_lines]. Returns uint64 [n]."""
    sums: Words = np.add.reduce(lines, axis=2) @ weights_of_lines
    return sums


def block_sums(blocks: npt.NDArray[np.uint8]) -> Words:
    """Checksums of whole blocks. blocks: uint8 [n, ...], each block contiguous and a multiple of 8 bytes long."""
    rows = blocks.reshape(blocks.shape[0], -1).view(np.uint64) if blocks.shape[0] else np.empty((0, 0), np.uint64)
    return partial_sums(rows, 0, rows.shape[1])
