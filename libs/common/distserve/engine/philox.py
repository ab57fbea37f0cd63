"""Counter-based random bits: Philox4x32-10 on tensors.

From Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Philox turns a 128-bit
counter and a 64-bit key into 128 random bits and keeps no state, so a draw is a function of what it is for and never
of what was drawn before.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four words of 32 random bits for every counter.

    All tensors are int64 with values in [0, 2^32), of shapes that broadcast to the result's. Products pass 2^63
    and wrap, which leaves their bits right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        # Words 1 and 3 carry garbage above bit 31 until the next round's mask: one operation less on each.
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = p1, p0
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def key_words(seed: int) -> tuple[int, int]:
    """A 64-bit seed as the two words of a key, low word first."""
    return seed & _MASK, (seed >> 32) & _MASK


def uniform(words: Tensor) -> Tensor:
    """32-bit words as float64 in the open interval (0, 1): the middle of each of the 2^32 cells, exactly."""
    return words.to(torch.float64).add_(0.5).mul_(2.0**-32)


def exponential(words: Tensor) -> Tensor:
    """32-bit words as standard exponential draws, float64, within (1e-10, 22.9): never 0, never infinite."""
    return uniform(words).log_().neg_()
