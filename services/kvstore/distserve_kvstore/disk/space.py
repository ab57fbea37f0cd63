"""How much room the tier may take, and how it is cut into segments. Arithmetic, but for one look at the file system."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from distserve.errors import ConfigError, DiskFull
from distserve_kvstore.disk.files import typed
from distserve_kvstore.disk.format import ALIGN, Shape
from distserve_kvstore.disk.records import DiskOptions

MIN_SEGMENTS = 8  # in the capacity: fewer, larger ones would leave compaction no room worth speaking of
_FULLEST = (7, 8)  # of the slots may live: the emptier segments are, the less is moved to empty one


@dataclass(frozen=True, slots=True)
class FileSystem:
    total_bytes: int
    free_bytes: int

    @classmethod
    def of(cls, folder: Path) -> FileSystem:
        """Raises DiskFailed."""
        with typed(folder / ".", "look at"):
            now = os.statvfs(folder)
        return cls(now.f_blocks * now.f_frsize, now.f_bavail * now.f_frsize)


class Space:
    """One segment's room is always kept for compaction, so that a full tier can be emptied. Where a crash has left that
    in pieces, compaction may go beyond the capacity by one segment, until it has put them together."""

    def __init__(self, folder: Path, shape: Shape, options: DiskOptions, file_bytes: int) -> None:
        """Raises ConfigError if the capacity is too small for any segments, DiskFailed."""
        self._folder = folder
        self._options = options
        least = shape.offset(1) + 2 * ALIGN
        capacity = options.capacity_bytes
        if capacity and capacity < (MIN_SEGMENTS // 2) * least:
            raise ConfigError(
                f"kvstore.disk_bytes is {capacity}, must be at least {(MIN_SEGMENTS // 2) * least} for blocks of "
                f"{shape.block_bytes} bytes, or 0 for no disk tier",
                key="kvstore.disk_bytes",
                value=capacity,
                expected=f">= {(MIN_SEGMENTS // 2) * least}",
            )
        self._shape = shape
        self.segment_bytes = least
        self.look(file_bytes)

    def look(self, file_bytes: int) -> int:
        """What segments may take in all, now that they take file_bytes. Raises DiskFailed."""
        now = FileSystem.of(self._folder)
        reserve = int(self._options.min_free_fraction * now.total_bytes)
        there = max(0, file_bytes + now.free_bytes - reserve)
        self._capacity = min(self._options.capacity_bytes or there, there)
        fitting = min(self._options.segment_bytes, self._capacity // MIN_SEGMENTS) // ALIGN * ALIGN
        self.segment_bytes = max(self.segment_bytes, fitting)  # they grow when others have given room back
        self.num_slots = self._shape.num_slots(self.segment_bytes)
        return self._capacity

    @property
    def capacity_bytes(self) -> int:
        """As of the last look."""
        return self._capacity

    @property
    def usable_blocks(self) -> int:
        return max(0, self._capacity // self.segment_bytes - 1) * self.num_slots * _FULLEST[0] // _FULLEST[1]

    def has_spare(self, file_bytes: int) -> bool:
        """Whether compaction's room is there, as of the last look."""
        return file_bytes + self.segment_bytes <= self._capacity

    def num_segments_left(self, file_bytes: int) -> int:
        """That appends may still begin, as of the last look."""
        return max(0, (self._capacity - file_bytes) // self.segment_bytes - 1)

    def require(self, file_bytes: int, *, compacting: bool, new: bool) -> None:
        """Room for more, in a new segment or the one that is open. Raises DiskFull, DiskFailed."""
        limit = self.look(file_bytes)
        if self.num_segments_left(file_bytes) > 0 or (not new and (compacting or self.has_spare(file_bytes))):
            return
        configured = limit == self._options.capacity_bytes
        # Compaction gives more back than it takes; beyond the file system's reserve it ends where that is full.
        if compacting and (not configured or file_bytes <= limit):
            return
        reason = "capacity" if configured else "reserve"
        raise DiskFull(
            f"{self._folder} is full: its blocks take {file_bytes} bytes of "
            + (f"{limit} (kvstore.disk_bytes)" if configured else f"{limit} that the file system can spare"),
            folder=str(self._folder),
            wanted_bytes=self.segment_bytes,
            reason=reason,
        )
