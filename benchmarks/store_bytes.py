"""The bytes that a driver puts, and those that it got: one mapping, values to put in its first half, room for what is
got in the second. numpy only, for drivers of peers too."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.store_values import Load


class Bytes:
    """Every page is touched when it is made, so that no first use is in a figure."""

    def __init__(self, load: Load, memory: NDArray[Any]) -> None:
        """memory: 2 * load.total_bytes of uint8."""
        self._load = load
        rows = memory.reshape(2 * load.num_values, load.size.value_bytes)
        self.source, self.target = rows[: load.num_values], rows[load.num_values :]
        words = self.source.reshape(-1).view(np.uint64)
        words[:] = np.random.default_rng(load.num_values).integers(0, 1 << 63, len(words), dtype=np.uint64)
        self.blank()

    def stamp(self, turn: int) -> None:
        """Contents of this turn: no value is what one of the same name or of an earlier turn was."""
        marks = self.source.view(np.uint64)
        marks[:, 0] = turn
        marks[:, -1] = np.arange(self._load.num_values, dtype=np.uint64)

    def blank(self) -> None:
        self.target[:] = 0

    def check(self) -> None:
        """Raises ValueError unless what was got is what was put."""
        wrong = np.flatnonzero([not np.array_equal(a, b) for a, b in zip(self.source, self.target, strict=True)])
        if len(wrong):
            raise ValueError(
                f"{len(wrong)} of {self._load.num_values} values are wrong, the first is number {wrong[0]}"
            )
