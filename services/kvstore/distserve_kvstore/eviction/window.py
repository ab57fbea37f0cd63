"""How large the window of a tier should be: as it would have been best lately."""

from __future__ import annotations

from collections import Counter

import numpy as np

from distserve_kvstore.columns import Keys
from distserve_kvstore.eviction.miniature import Miniature
from distserve_kvstore.eviction.sketch import HIGHEST, SAMPLE

PARTS = (0.01, 0.2, 0.5, 1.0)  # of the capacity; with 1 the tier is LRU
FIRST = 3  # number of the part that it begins with: LRU, until another has shown that it is better
MODEL = 1024  # a model holds so many blocks, or up to twice that
MARGIN = 1.01  # another size must have had more hits by this, so that it does not go to and fro
_FADE = 0.7  # what hits of the time before count for


class Window:
    """Models of the tier, one for each part, are asked for a sample of the blocks; the part whose model had the most
    hits is the window's. The sample is drawn by hash, and a model is smaller than the tier by as much as the sample is
    than all (Waldspurger, Saemundsson, Ahmad, Park: Cache Modeling and Optimization using Miniature Simulations, USENIX
    ATC 2017).
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        one_in = 1 << max(0, (capacity // MODEL).bit_length() - 1)
        self._mask = np.uint64(one_in - 1)
        self._model_size = max(1, capacity // one_in)
        self._frequencies: Counter[int] = Counter()  # of the sample; who asks for one that is gone adds nothing
        self._models = [Miniature(self._model_size, part, self._frequencies) for part in PARTS]
        self._hits = [0.0] * len(PARTS)
        self._best = FIRST
        self._num_asked = 0
        self._num_counted = 0

    @property
    def num_blocks(self) -> int:
        """What the window may hold."""
        return max(1, round(PARTS[self._best] * self._capacity))

    def asked(self, keys: Keys) -> None:
        """For these blocks, the deepest of a chain first."""
        sampled = keys[(keys[:, 3] & self._mask) == 0, 2].tolist()
        for key in sampled:
            self._frequencies[key] = min(HIGHEST, self._frequencies[key] + 1)
            for i, model in enumerate(self._models):
                self._hits[i] += model.ask(key)
        self._num_asked += len(sampled)
        self._num_counted += len(sampled)
        if self._num_counted >= SAMPLE * self._model_size:
            self._age()
        if self._num_asked >= self._model_size:
            self._choose()

    def _choose(self) -> None:
        best = max(range(len(PARTS)), key=self._hits.__getitem__)
        if self._hits[best] > MARGIN * self._hits[self._best]:
            self._best = best
        self._hits = [_FADE * hits for hits in self._hits]
        self._num_asked = 0

    def _age(self) -> None:
        halved = {key: count >> 1 for key, count in self._frequencies.items() if count > 1}
        self._frequencies.clear()
        self._frequencies.update(halved)
        self._num_counted //= 2
