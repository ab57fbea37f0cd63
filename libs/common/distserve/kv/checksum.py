"""One checksum per block, computed where the bytes lie.

    sum(block) = Σ weight(i) · word(i)  mod 2^64,    weight(i) = splitmix64(i) | 1

over the full block's little-endian uint64 words, i counting from the block's first word. Being a sum it is additive
over layers: sums of parts add up, whatever the order they are made in, so both sides compute it span by span while
the bytes are still in cache; a GPU can do the same with one multiply and add per word.

What it sees: any single changed word (an odd weight is invertible mod 2^64); and, but for one case in 2^63 or so,
words, layers or blocks in the wrong place, stale or torn. Its known blind spot: two words swapped that differ only
in their top k bits go unseen with probability 2^(1-k), since a difference of odd weights is even. It guards one copy
against faults of the transfer, not against forgery; splitmix64 is Steele, Lea, Flood, "Fast splittable pseudorandom
number generators" (OOPSLA 2014), as finalised by Vigna.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

WORD_BYTES = 8
Words: TypeAlias = npt.NDArray[np.uint64]


@lru_cache(maxsize=8)
def weights(num_words: int) -> Words:
    """splitmix64(i) | 1 for i in [0, num_words); read-only."""
    z = (np.arange(num_words, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    z.flags.writeable = False
    return z


def partial_sums(rows: Words, first_word: int, num_words: int) -> Words:
    """What words [first_word, first_word + k) of blocks of `num_words` words add to each block's checksum.

    rows: uint64 [n, k], those words of n blocks; rows may be strided. Returns uint64 [n]. One pass, no temporaries;
    the GIL is released (einsum here, because numpy's matmul on integers holds it).
    """
    part = weights(num_words)[first_word : first_word + rows.shape[1]]
    sums: Words = np.einsum("bw,w->b", rows, part)
    return sums


def block_sums(blocks: npt.NDArray[np.uint8]) -> Words:
    """Checksums of whole blocks. blocks: uint8 [n, ...], each block contiguous and a multiple of 8 bytes long."""
    rows = blocks.reshape(blocks.shape[0], -1).view(np.uint64) if blocks.shape[0] else np.empty((0, 0), np.uint64)
    return partial_sums(rows, 0, rows.shape[1])
