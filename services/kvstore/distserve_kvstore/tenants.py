"""Whose blocks: a number for each tenant that has any."""

from __future__ import annotations

import numpy as np

from distserve_kvstore.columns import Entries


class Tenants:
    """Tenants' names by number, as long as they have blocks; numbers are used again."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._counts: list[int] = []
        self._vacant: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, name: str, n: int) -> int:
        """It has n blocks more; its number."""
        number = self._numbers.get(name)
        if number is None:
            if self._vacant:
                number = self._vacant.pop()
                self._names[number] = name
            else:
                number = len(self._names)
                self._names.append(name)
                self._counts.append(0)
            self._numbers[name] = number
        self._counts[number] += n
        return number

    def discard(self, numbers: Entries) -> None:
        """Of each block that is no more its tenant's number."""
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            self._counts[number] -= int(count)
            if not self._counts[number]:
                del self._numbers[self._names[number]]
                self._vacant.append(int(number))

    def name(self, number: int) -> str:
        return self._names[number]

    def number(self, name: str) -> int:
        """-1 if it has no blocks."""
        return self._numbers.get(name, -1)

    def counts(self) -> dict[int, int]:
        """Blocks by number."""
        return {number: self._counts[number] for number in self._numbers.values()}
