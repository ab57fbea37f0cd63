"""Where every place is: the tier's memory of its folder. No I/O."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from distserve.errors import BlockDamaged, BlocksMissing, KVError
from distserve_kvstore.disk.recovery import Recovery
from distserve_kvstore.disk.segment import NOWHERE, Segment

N = TypeVar("N", np.int32, np.uint64)

# In the column of segments, for places that are nowhere:
_FREE = -1
_DAMAGED = -2  # set aside; its owner has yet to free it
_BURIED = -3  # freed, but not to be given to others yet


@dataclass(frozen=True, slots=True)
class Location:
    place: int
    segment: Segment
    slot: int
    serial: int


class Ledger:
    """Safe from any thread; its lock is held for no longer than arithmetic takes.

    A place is free, or somebody's: at a slot of a segment, set aside, or buried. A record lives while its segment's
    place_of and its place's columns point at each other. 16 bytes a place, 4 a slot.
    """

    def __init__(self, found: Recovery) -> None:
        self._lock = threading.Lock()
        self._segments = {s.number: s for s in found.segments}
        self._segment, self._slot, self._serial = found.segment_numbers, found.slots, found.serials
        self._num_places = len(found.slots)  # ever given; columns may be longer
        self._free: list[int] = []
        self._dead_elsewhere = np.array(found.dead_elsewhere, np.uint64)

    # ------------------------------------------------------------ segments

    def add(self, segment: Segment) -> None:
        with self._lock:
            self._segments[segment.number] = segment

    def remove(self, segment: Segment) -> None:
        """Its file is about to go. No record of it lives."""
        with self._lock:
            if segment.num_live:
                raise KVError(f"{segment.path} goes with {segment.num_live} blocks in it")
            del self._segments[segment.number]
            segment.removed = True

    def close(self, segment: Segment, file_bytes: int) -> None:
        with self._lock:
            segment.close(file_bytes)

    def segments(self) -> list[Segment]:
        with self._lock:
            return list(self._segments.values())

    @property
    def file_bytes(self) -> int:
        with self._lock:
            return sum(s.file_bytes for s in self._segments.values())

    @property
    def num_live(self) -> int:
        with self._lock:
            return sum(s.num_live for s in self._segments.values())

    @property
    def num_dead(self) -> int:
        """Records whose serials must be noted."""
        with self._lock:
            return len(self._dead_elsewhere) + sum(s.num_dead for s in self._segments.values())

    # ------------------------------------------------------------ places

    def adopt(self, segment: Segment, first_slot: int, serials: Sequence[int]) -> list[int]:
        """Places for records that were just written to neighbouring slots."""
        with self._lock:
            places = self._take(len(serials))
            segment.adopt(first_slot, places)
            self._segment[places] = segment.number
            self._slot[places] = np.arange(first_slot, first_slot + len(places))
            self._serial[places] = serials
            return places

    def _take(self, n: int) -> list[int]:
        reused = [self._free.pop() for _ in range(min(n, len(self._free)))]
        first, self._num_places = self._num_places, self._num_places + n - len(reused)
        if self._num_places > len(self._segment):
            longer = max(self._num_places, 2 * len(self._segment), 1024)
            self._segment = _longer(self._segment, longer, _FREE)
            self._slot = _longer(self._slot, longer, NOWHERE)
            self._serial = _longer(self._serial, longer, 0)
        return reused + list(range(first, self._num_places))

    def locate(self, places: Iterable[int]) -> list[Location | KVError]:
        """Where their bytes are, or why they are nowhere: BlocksMissing (nobody's), BlockDamaged (set aside)."""
        with self._lock:
            return [self._locate(place) for place in places]

    def _locate(self, place: int) -> Location | KVError:
        number = self._number(place)
        if number >= 0:
            return Location(place, self._segments[number], int(self._slot[place]), int(self._serial[place]))
        if number == _DAMAGED:
            return BlockDamaged(f"place {place} on disk was set aside", where=f"place {place}", reason="set aside")
        return BlocksMissing(f"place {place} on disk is nobody's", num_present=0, tier="disk")

    def _number(self, place: int) -> int:
        return int(self._segment[place]) if 0 <= place < self._num_places else _FREE

    def bury(self, places: Sequence[int], *, forgotten: bool) -> list[int]:
        """Their records are dead; their serials. The places are given to nobody until release(). Burying again does
        nothing. KVError, and nothing changes, if one is nobody's, or named twice."""
        with self._lock:
            if len(set(places)) < len(places) or any(self._number(p) == _FREE for p in places):
                raise KVError("a place on disk is freed twice, or is nobody's", places=str(list(places)[:8]))
            serials = []
            for place in places:
                if (number := self._number(place)) >= 0:
                    segment = self._segments[number]
                    serials.append(int(self._serial[place]))
                    segment.bury(int(self._slot[place]), serials[-1])
                    segment.num_forgotten += forgotten
                self._segment[place] = _BURIED
            return serials

    def release(self, places: Sequence[int]) -> None:
        """Buried ones may be given to others."""
        with self._lock:
            for place in places:
                if self._number(place) == _BURIED:
                    self._segment[place] = _FREE
                    self._free.append(place)

    def set_aside(self, at: Location, reason: str) -> bool:
        """A block is damaged. False, and nothing changes, if it isn't there any more."""
        with self._lock:
            if not self._is_at(at):
                return False
            at.segment.bury(at.slot, at.serial)
            at.segment.damage = at.segment.damage or reason
            self._segment[at.place] = _DAMAGED
            return True

    def _is_at(self, at: Location) -> bool:
        here = self._segment[at.place] == at.segment.number and self._slot[at.place] == at.slot
        return bool(here and self._serial[at.place] == at.serial)

    # ------------------------------------------------------------ compaction

    def living(self, segment: Segment, first_slot: int = 0) -> list[Location]:
        """In order of their slots, from first_slot on."""
        with self._lock:
            slots = first_slot + np.flatnonzero(segment.place_of[first_slot:] != NOWHERE)
            places = segment.place_of[slots]
            serials = self._serial[places]
            rows = zip(places.tolist(), slots.tolist(), serials.tolist(), strict=True)
            return [Location(place, segment, slot, serial) for place, slot, serial in rows]

    def move(self, moved: Sequence[Location], target: Segment, first_slot: int) -> int:
        """Copies of them were written to neighbouring slots of another segment; how many of them still lived."""
        with self._lock:
            num_moved = 0
            for slot, at in enumerate(moved, first_slot):
                alive = self._is_at(at)
                if alive:
                    at.segment.bury(at.slot, at.serial)
                    self._segment[at.place], self._slot[at.place] = target.number, slot
                    target.place_of[slot] = at.place
                    num_moved += 1
                else:
                    target.dead.append(at.serial)
                    target.num_forgotten += at.segment.num_forgotten > 0
            target.num_records = first_slot + len(moved)
            target.num_live += num_moved
            return num_moved

    def dead_serials(self) -> list[int]:
        """Of dead records that are, or may be, still in files, but for older copies of living ones."""
        with self._lock:
            in_files = [np.frombuffer(s.dead, np.uint64) for s in self._segments.values() if s.dead]
            in_use = self._segment[: self._num_places] >= 0
            living = self._serial[: self._num_places][in_use]
        in_files.append(self._dead_elsewhere)
        dead: list[int] = np.setdiff1d(np.concatenate(in_files), living).tolist()
        return dead

    def check(self) -> None:
        """Raises KVError if segments and places do not point at each other, or counts are wrong."""
        with self._lock:
            for s in self._segments.values():
                slots = np.flatnonzero(s.place_of != NOWHERE)
                places = s.place_of[slots]
                wrong = (self._segment[places] != s.number).any() or (self._slot[places] != slots).any()
                if wrong or len(slots) != s.num_live or s.num_live > s.num_records:
                    raise KVError(f"the places of {s.path} are wrong", counted=len(slots), num_live=s.num_live)
            in_use = int((self._segment[: self._num_places] >= 0).sum())
            num_live = sum(s.num_live for s in self._segments.values())
            if in_use != num_live or len(set(self._free)) != len(self._free):
                raise KVError("places on disk are wrong", in_use=in_use, num_live=num_live)


def _longer(column: npt.NDArray[N], length: int, value: int) -> npt.NDArray[N]:
    grown = np.full(length, value, column.dtype)
    grown[: len(column)] = column
    return grown
