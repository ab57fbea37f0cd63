"""What a node knows of each block, as columns: one numpy array a property, one element an entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Entries: TypeAlias = NDArray[np.int32]  # entry numbers; a chain's are in its order, the first block first
Keys: TypeAlias = NDArray[np.uint64]  # [n, 4]: 32 bytes each

NONE: Entries = np.zeros(0, np.int32)
BATCH, NORMAL = 0, 1  # values of `priority`


class Watcher(Protocol):
    """Who must know of changes that it did not make (eviction's Policy)."""

    def linked(self, children: Entries) -> None:
        """These were here before their parent, and have it now."""

    def released(self, entries: Entries) -> None:
        """These have lost their last pin, or the last pinned conversation that ran through them."""

    def cherished(self, entries: Entries) -> None:
        """A pinned conversation runs through these from now on."""


class Nobody:
    """A Watcher that doesn't care."""

    def linked(self, children: Entries) -> None: ...
    def released(self, entries: Entries) -> None: ...
    def cherished(self, entries: Entries) -> None: ...


class Columns:
    """Entry numbers and their columns.

    The arrays are replaced when they grow: after an insert read them anew (`index.dram`). Above the highest number ever
    given they are all zeros and were never touched: reserved room costs addresses, not memory.
    """

    hashes: Keys  # the 32 bytes of the name
    parent: Entries  # the block before it, -1: not here
    first_child: Entries  # children are a doubly linked list
    next_sibling: Entries
    previous_sibling: Entries
    num_children: Entries  # here, in whatever tier
    depth: Entries  # 0: a prompt's first block; -1: nobody has this number
    dram: Entries  # block of the arena, -1: not in memory
    disk: NDArray[np.int64]  # place on disk, -1: not there
    object: Entries  # number of the object, -1: in none
    num_pins: Entries  # askers' pins and bytes under way (pins.py)
    num_conversations: Entries  # named ones that run through it (conversations.py)
    num_vips: Entries  # those of them that are pinned
    tenant: Entries  # a number (tenants.py)
    priority: NDArray[np.uint8]  # BATCH or NORMAL

    def __init__(self, capacity: int) -> None:
        self.watcher: Watcher = Nobody()
        self.capacity = 0
        self._top = 0  # numbers from here on were never given
        self._num_free = 0
        for name, dtype, shape in _SPECS:
            setattr(self, name, np.zeros((0, *shape), dtype))
        self._free = NONE  # a stack of numbers below _top
        self._grow(max(capacity, 16))

    def __len__(self) -> int:
        return self._top - self._num_free

    @property
    def num_bytes(self) -> int:
        """Of the columns, up to the highest number ever given."""
        return sum(getattr(self, name)[: self._top].nbytes for name in _NAMES)

    def entries(self) -> Entries:
        """All there are. Looks at every number."""
        return np.flatnonzero(self.depth[: self._top] >= 0).astype(np.int32)

    def ancestors(self, entry: int) -> Iterator[int]:
        """`entry`, its parent, and so on, as far as they are here."""
        parent = self.parent.data
        while entry >= 0:
            yield entry
            entry = parent[entry]

    def deepest_first(self, entries: Entries) -> Entries:
        """The same, children before parents."""
        ordered: Entries = entries[np.argsort(-self.depth[entries], kind="stable")]
        return ordered

    def in_some_tier(self, entries: Entries) -> NDArray[np.bool_]:
        """For each whether any tier has it."""
        found: NDArray[np.bool_] = (self.dram[entries] & self.disk[entries] & self.object[entries]) >= 0
        return found

    def _grow(self, capacity: int) -> None:
        """In one go: copies what there is."""
        for name in _NAMES:
            old = getattr(self, name)
            new = np.zeros((capacity, *old.shape[1:]), old.dtype)
            new[: self._top] = old[: self._top]
            setattr(self, name, new)
        self.capacity = capacity

    def _allocate(self, n: int) -> Entries:
        """`n` numbers, in no tier, without links, pins and conversations; name, depth, tenant, priority to be set."""
        again = min(n, self._num_free)
        top = self._top + n - again
        if top > self.capacity:
            self._grow(max(2 * self.capacity, top))
        self._num_free -= again
        used = self._free[self._num_free : self._num_free + again]
        entries = np.concatenate((used[::-1], np.arange(self._top, top, dtype=np.int32)))
        self._top = top
        for name in ("parent", "first_child", "next_sibling", "previous_sibling", "dram", "disk", "object"):
            getattr(self, name)[entries] = -1
        for name in ("num_children", "num_pins", "num_conversations", "num_vips"):
            getattr(self, name)[entries] = 0
        return entries

    def _release(self, entries: Entries) -> None:
        self._free[self._num_free : self._num_free + len(entries)] = entries
        self._num_free += len(entries)
        self.depth[entries] = -1
        self.hashes[entries] = 0


_SPECS: tuple[tuple[str, type[np.generic], tuple[int, ...]], ...] = (
    ("hashes", np.uint64, (4,)),
    ("parent", np.int32, ()),
    ("first_child", np.int32, ()),
    ("next_sibling", np.int32, ()),
    ("previous_sibling", np.int32, ()),
    ("num_children", np.int32, ()),
    ("depth", np.int32, ()),
    ("dram", np.int32, ()),
    ("disk", np.int64, ()),
    ("object", np.int32, ()),
    ("num_pins", np.int32, ()),
    ("num_conversations", np.int32, ()),
    ("num_vips", np.int32, ()),
    ("tenant", np.int32, ()),
    ("priority", np.uint8, ()),
)
_NAMES = (*(name for name, _, _ in _SPECS), "_free")
