"""How often something was asked for lately, in a few bytes, also of what is no longer here.

A count-min sketch (Cormode, Muthukrishnan: An improved data stream summary, Journal of Algorithms 55(1), 2005) with
conservative update (Estan, Varghese: New directions in traffic measurement and accounting, SIGCOMM 2002) and ageing by
halving, as TinyLFU has it (Einziger, Friedman, Manes: TinyLFU: A Highly Efficient Cache Admission Policy, ACM
Transactions on Storage 13(4), 2017).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distserve_kvstore.columns import Keys

HIGHEST = 15
SAMPLE = 10  # counts for each element of the capacity, then all are halved
_ROWS = 4


class FrequencySketch:
    """Four rows of counters from 0 to 15. An element's counters are named by the four words of its key, which is a
    sha256: they need no further hashing. Estimates are never too low, until they are halved together."""

    def __init__(self, capacity: int) -> None:
        """capacity: elements among which it should tell well; a byte for each in each row, or up to two."""
        self._width = 1 << max(6, (capacity - 1).bit_length())
        self._counters = np.zeros(_ROWS * self._width, np.uint8)
        self._offsets = np.arange(_ROWS, dtype=np.uint64) * np.uint64(self._width)
        self._mask = np.uint64(self._width - 1)
        self._sample = SAMPLE * max(capacity, 1)
        self.num_counted = 0  # since they were halved, what was before halved too

    @property
    def num_bytes(self) -> int:
        return self._counters.nbytes

    def add(self, keys: Keys) -> None:
        """One more for each; a key that is named twice may count once."""
        places = (keys & self._mask) + self._offsets
        counts = self._counters[places]
        higher = np.minimum(counts.min(axis=1) + 1, HIGHEST).astype(np.uint8)
        np.maximum.at(self._counters, places, higher[:, None])
        self.num_counted += len(keys)
        if self.num_counted >= self._sample:
            self._counters >>= 1
            self.num_counted //= 2

    def estimate(self, keys: Keys) -> NDArray[np.uint8]:
        counts: NDArray[np.uint8] = self._counters[(keys & self._mask) + self._offsets].min(axis=1)
        return counts
