"""Space back from dead blocks: the living move out of the emptiest segments, whose files then go.

The greedy choice of log-structured file systems (Rosenblum, Ousterhout, "The Design and Implementation of a
Log-Structured File System", SOSP 1991), without ageing: victims of eviction are mostly old, so old segments are empty
of themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from distserve.errors import DiskFailed
from distserve_kvstore.disk.appender import Appender
from distserve_kvstore.disk.damage import MAX_FAILURES, Damage
from distserve_kvstore.disk.files import Scratch
from distserve_kvstore.disk.format import HEADER_BYTES, Damaged, RecordHeader, Shape
from distserve_kvstore.disk.ledger import Ledger, Location
from distserve_kvstore.disk.open_files import OpenFiles
from distserve_kvstore.disk.records import CompactReport
from distserve_kvstore.disk.segment import Segment
from distserve_kvstore.disk.segment_reads import check_record
from distserve_kvstore.disk.space import Space

BATCH_BYTES = 8 << 20  # read, then written, under the writers' lock: what an append may wait for

_scratch = Scratch()


def emptiest(sealed: Sequence[Segment], num_slots: int, below: float, *, pressed: bool) -> Segment | None:
    """The segment to empty next, None if none is worth it. First those with forgotten or damaged blocks; then the one
    with the smallest part of living blocks, if that is under `below`, or whatever it is if space is short (pressed);
    then small ones, as restarts leave them, two of which fit into one."""
    candidates = [s for s in sealed if s.num_records]
    urgent = [s for s in candidates if s.num_forgotten or s.damage]
    if urgent:
        return min(urgent, key=lambda s: s.num_live)
    worth = [s for s in candidates if s.num_dead and (pressed or s.num_live < below * s.num_records)]
    if worth:
        return min(worth, key=lambda s: s.num_live / s.num_records)
    small = [s for s in candidates if 2 * s.num_live <= num_slots]
    return min(small, key=lambda s: s.num_live) if len(small) > 1 else None


class Compaction:
    """Slices of it, each in batches; between batches others may write."""

    def __init__(
        self,
        appender: Appender,
        ledger: Ledger,
        files: OpenFiles,
        space: Space,
        shape: Shape,
        damage: Damage,
        below: float,
    ) -> None:
        self._appender = appender
        self._ledger = ledger
        self._files = files
        self._space = space
        self._shape = shape
        self._damage = damage
        self._below = below

    def slice(self, budget_bytes: int) -> CompactReport:
        """Raises DiskFull, DiskFailed."""
        num_moved, left = 0, max(1, budget_bytes // self._shape.record_bytes)
        freed = self._drop_dead()
        while left > 0 and (source := self._next()) is not None:
            looked_at, moved = self._move_some(source, left)
            left -= max(1, looked_at)
            num_moved += moved
            freed += self._drop_dead()
        return CompactReport(num_moved, freed, self._next() is not None)

    def _drop_dead(self) -> int:
        with self._appender.lock:
            return self._appender.drop_dead()

    def _next(self) -> Segment | None:
        with self._appender.lock:
            if (opened := self._appender.segment) is not None and (opened.num_forgotten or opened.damage):
                self._appender.retire()  # so that it can be emptied too
            sealed = [s for s in self._ledger.segments() if s is not self._appender.segment]
            slots = self._space.num_slots
            room = self._appender.num_free + slots * self._space.num_segments_left(self._appender.file_bytes)
            return emptiest(sealed, slots, self._below, pressed=2 * room < slots)

    def _move_some(self, source: Segment, most: int) -> tuple[int, int]:
        """(blocks looked at, moved), at most `most` and a batch."""
        most = max(1, min(most, BATCH_BYTES // self._shape.record_bytes))
        with self._appender.lock:
            if source.removed:
                return 0, 0
            living = self._ledger.living(source)[:most]
            whole, headers, raw = self._read(source, living)
            return len(living), self._appender.copy(headers, raw, whole)

    def _read(
        self, source: Segment, living: Sequence[Location]
    ) -> tuple[list[Location], list[RecordHeader], list[memoryview]]:
        """Those that are whole, with their headers and records as they lie there. The others are set aside."""
        size = self._shape.record_bytes
        memory = _scratch.take(len(living) * size)
        whole: list[Location] = []
        headers: list[RecordHeader] = []
        raw: list[memoryview] = []
        done = 0
        # Neighbours, which lie in consecutive slots, are read at once.
        for _, group in groupby(enumerate(living), key=lambda pair: pair[1].slot - pair[0]):
            run = [at for _, at in group]
            records = [memory[(done + i) * size : (done + i + 1) * size] for i in range(len(run))]
            for at, record, is_there in zip(run, records, self._read_run(source, run, records), strict=True):
                if is_there is None:  # set aside already
                    continue
                payload = record[HEADER_BYTES : HEADER_BYTES + self._shape.block_bytes]
                found = (
                    check_record(record[:HEADER_BYTES], payload, source.salt)
                    if is_there
                    else Damaged("the file ends before it")
                )
                if isinstance(found, Damaged) or found.serial != at.serial:
                    self._damage.found(at, found)
                    continue
                whole.append(at)
                headers.append(found)
                raw.append(record)
            done += len(run)
        return whole, headers, raw

    def _read_run(
        self, source: Segment, run: Sequence[Location], records: Sequence[memoryview]
    ) -> list[Literal[True, False, None]]:
        """Neighbours; of each whether it is there, None: it can't be read, and was set aside. Raises DiskFailed."""
        offset = self._shape.offset(run[0].slot)
        try:
            num_there = self._files.get(source.path).read(records, offset) // self._shape.record_bytes
            return [i < num_there for i in range(len(run))]
        except DiskFailed as e:
            if len(run) > 1:  # it may be one bad spot
                return [self._read_run(source, [at], [record])[0] for at, record in zip(run, records, strict=True)]
            return [self._read_again(source, run[0], records[0], e)]

    def _read_again(
        self, source: Segment, at: Location, record: memoryview, error: DiskFailed
    ) -> Literal[True, False, None]:
        """A single one that could not be read, until that works or it is damaged: it holds up its whole segment."""
        for _ in range(MAX_FAILURES):
            if not isinstance(self._damage.unreadable(at, error), DiskFailed):
                return None
            try:
                there = self._files.get(source.path).read([record], self._shape.offset(at.slot))
                return there == self._shape.record_bytes
            except DiskFailed as e:
                error = e
        raise error
