"""Which entries were deleted, and are kept only until they can be removed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distserve.errors import KVError
from distserve_kvstore.columns import Entries


@dataclass(frozen=True, slots=True)
class Removed:
    """What a deletion has left to be done elsewhere: places on disk to be forgotten, objects to be deleted."""

    num_blocks: int
    places: list[int]
    objects: list[int]


class Doomed:
    """Found no more from the moment they are added. They go in slices, and those that bytes are being read from or
    written to when that has ended (Holdings.remove_doomed)."""

    def __init__(self) -> None:
        self._entries: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: int) -> bool:
        return entry in self._entries

    def among(self, entries: Entries) -> NDArray[np.bool_]:
        """Of each whether it is."""
        if not self._entries:
            return np.zeros(len(entries), np.bool_)
        return np.fromiter((e in self._entries for e in entries.tolist()), np.bool_, len(entries))

    def add(self, entries: Entries) -> None:
        """Costs next to nothing."""
        self._entries.update(entries.tolist())

    def discard(self, entries: Iterable[int]) -> None:
        """They are gone, and their numbers may be others' from now on; or they were offered again."""
        self._entries.difference_update(entries)

    def check(self, entries: Entries) -> None:
        """Raises KVError if one is not among these, which is all there are."""
        if gone := self._entries - set(entries.tolist()):
            raise KVError("what is gone is still to be deleted", num_entries=len(gone))
