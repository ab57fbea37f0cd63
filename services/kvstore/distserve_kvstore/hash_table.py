"""From the hash of a block to the number of its entry: open addressing with linear probing, for many at once."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from distserve.errors import KVError
from distserve_kvstore.columns import NONE, Entries, Keys

_LEAST_SLOTS = 64
_EMPTY = 0
_STEP = 1024  # slots that are moved at least with each addition, while there is an older table
_STEPS_EACH = 8  # for each name added; 2 would do to be done before the table doubles again


class HashTable:
    """Slots hold an entry number plus one; 0 is an empty slot. At most half of them may be used.

    A name's home is the highest bits of a product of its first 8 bytes with an odd number (Dietzfelbinger, Hagerup,
    Katajainen, Penttonen: A Reliable Randomized Algorithm for the Closest-Pair Problem, Journal of Algorithms 25(1),
    1997), drawn by chance so that nobody can choose names that crowd one place. All 32 bytes are compared before an
    entry is found. Nothing marks what was removed: the names behind a hole, up to the next empty slot, are taken out
    and put in again.

    It does not keep the names: `names` of every call are the index's column, zeros for an entry that nobody has.
    """

    def __init__(self, capacity: int, multiplier: int = 0) -> None:
        """Room for `capacity` names. multiplier: 0: by chance."""
        num_slots = max(_LEAST_SLOTS, 1 << (2 * capacity - 1).bit_length())
        self._slots: Entries = np.zeros(num_slots, np.int32)
        self._mask = num_slots - 1
        self._multiplier = np.uint64(multiplier or secrets.randbits(64) | 1)
        self._shift = np.uint64(64 - self._mask.bit_length())
        self._num_used = 0

    def __len__(self) -> int:
        return self._num_used

    @property
    def capacity(self) -> int:
        return len(self._slots) // 2

    @property
    def num_bytes(self) -> int:
        return self._slots.nbytes

    def find(self, keys: Keys, names: Keys) -> Entries:
        """Of each key its entry, or -1."""
        found = np.full(len(keys), -1, np.int32)
        lanes = np.arange(len(keys))
        places = self._homes(keys)
        while len(lanes):
            entries = self._slots[places] - np.int32(1)
            used = entries >= 0
            if not used.all():
                entries, lanes, places, keys = entries[used], lanes[used], places[used], keys[used]
            same = (names[entries] == keys).all(axis=1)
            found[lanes[same]] = entries[same]
            if same.all():
                break
            other = ~same
            lanes, keys, places = lanes[other], keys[other], (places[other] + 1) & self._mask
        return found

    def entries(self, start: int, stop: int) -> Entries:
        """Those in these slots."""
        slots = self._slots[start:stop]
        used: Entries = slots[slots != _EMPTY] - np.int32(1)
        return used

    def add(self, entries: Entries, names: Keys) -> None:
        """Their names, which are new and differ, are known from now on. There must be room."""
        self._num_used += len(entries)
        self._put(entries, names)

    def discard(self, entries: Entries, names: Keys) -> None:
        """They are known no more."""
        holes = self._places_of(entries, names)
        self._slots[holes] = _EMPTY
        self._num_used -= len(entries)
        moved: list[Entries] = []
        places = (holes + 1) & self._mask
        while len(places):
            behind = self._slots[places]
            places, behind = places[behind != _EMPTY], behind[behind != _EMPTY]
            self._slots[places] = _EMPTY
            moved.append(behind - np.int32(1))
            places = (places + 1) & self._mask
        # Nothing is taken twice: the lanes start apart and step alike, and one that comes to another's hole ends there.
        self._put(np.concatenate(moved) if moved else NONE, names)

    def _homes(self, keys: Keys) -> NDArray[np.int64]:
        return ((keys[:, 0] * self._multiplier) >> self._shift).astype(np.int64)

    def _places_of(self, entries: Entries, names: Keys) -> NDArray[np.int64]:
        places = self._homes(names[entries])
        wrong = np.flatnonzero(self._slots[places] != entries + np.int32(1))
        while len(wrong):
            if not self._slots[places[wrong]].all():
                raise KVError("an entry is not in the table of names", num_entries=len(entries))
            places[wrong] = (places[wrong] + 1) & self._mask
            wrong = wrong[self._slots[places[wrong]] != entries[wrong] + np.int32(1)]
        return places

    def _put(self, entries: Entries, names: Keys) -> None:
        """Into the first empty slot from home on. Of several that want the same slot one gets it, the others go on."""
        places = self._homes(names[entries])
        while len(entries):
            empty = np.flatnonzero(self._slots[places] == _EMPTY)
            self._slots[places[empty]] = entries[empty] + np.int32(1)
            waiting = self._slots[places] != entries + np.int32(1)
            entries, places = entries[waiting], (places[waiting] + 1) & self._mask


class NameTable:
    """A HashTable that doubles without a stall: what the smaller one has is moved a little with each addition, and
    until then looked for in both. The smaller one is not repaired meanwhile: it may lead to an entry that has another
    name by now, or none, which comparing names tells.
    """

    def __init__(self, capacity: int) -> None:
        self._table = HashTable(capacity)
        self._older: HashTable | None = None
        self._moved = 0  # slots of the older one
        self._num_names = 0

    def __len__(self) -> int:
        return self._num_names

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes + (self._older.num_bytes if self._older else 0)

    def find(self, keys: Keys, names: Keys) -> Entries:
        """Of each key, of which none is zeros, its entry, or -1."""
        found = self._table.find(keys, names)
        if self._older and len(missing := np.flatnonzero(found < 0)):
            found[missing] = self._older.find(keys[missing], names)
        return found

    def add(self, entries: Entries, names: Keys) -> None:
        """Their names, which are new and differ, are known from now on."""
        self._num_names += len(entries)
        if self._num_names > self._table.capacity:
            self._older, self._moved = self._table, 0
            self._table = HashTable(max(2 * self._table.capacity, self._num_names))
        self._table.add(entries, names)
        self._move(names, max(_STEP, _STEPS_EACH * len(entries)))

    def discard(self, entries: Entries, names: Keys) -> None:
        """They are known no more, and have no names after this call."""
        self._num_names -= len(entries)
        if self._older:
            entries = entries[self._table.find(names[entries], names) >= 0]
        self._table.discard(entries, names)

    def check(self, names: Keys) -> bool:
        """As many entries as counted are found by their names."""
        entries = np.flatnonzero(names.any(axis=1)).astype(np.int32)
        if self._older is None and len(self._table) != len(self):
            return False
        return len(entries) == len(self) and bool((self.find(names[entries], names) == entries).all())

    def _move(self, names: Keys, num_slots: int) -> None:
        if self._older is None:
            return
        entries = self._older.entries(self._moved, self._moved + num_slots)
        entries = entries[names[entries].any(axis=1)]
        self._table.add(entries[self._table.find(names[entries], names) < 0], names)
        self._moved += num_slots
        if self._moved >= 2 * self._older.capacity:
            self._older = None
