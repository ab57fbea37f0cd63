"""The writing side: records into the segment that is open for them, one writer at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from distserve.errors import DiskFailed, DiskFull, KVError
from distserve.messages import KVLayout
from distserve_kvstore.disk.files import sync_folder, typed
from distserve_kvstore.disk.format import RecordHeader, Shape, check_names, payload_sum
from distserve_kvstore.disk.journal import Journal
from distserve_kvstore.disk.ledger import Ledger, Location
from distserve_kvstore.disk.open_files import OpenFiles
from distserve_kvstore.disk.records import DiskOptions, Record
from distserve_kvstore.disk.segment import Segment
from distserve_kvstore.disk.segment_writer import MAX_WRITE_BYTES, SegmentWriter
from distserve_kvstore.disk.set_aside import SetAside
from distserve_kvstore.disk.space import Space

log = logging.getLogger(__name__)


class Appender:
    """Belongs to whoever holds `lock`. What is written is synced when options.sync_bytes have gathered (one fdatasync
    for all of them), when a segment is sealed, and by sync(). A crash of the process loses nothing that append()
    returned; a crash of the machine may lose what was not synced, and what is torn then is dropped or found by its
    checksum."""

    def __init__(
        self,
        folder: Path,
        layout: KVLayout,
        options: DiskOptions,
        space: Space,
        ledger: Ledger,
        files: OpenFiles,
        journal: Journal,
        aside: SetAside,
        *,
        next_number: int,
        next_serial: int,
    ) -> None:
        self.lock = threading.Lock()
        self.aside = aside
        self._folder = folder
        self._layout = layout
        self._shape = Shape.of(layout)
        self._sync_bytes = options.sync_bytes
        self._space = space
        self._ledger = ledger
        self._files = files
        self._journal = journal
        self._next_number = next_number
        self._next_serial = next_serial
        self._writer: SegmentWriter | None = None
        self._unsynced_bytes = 0

    @property
    def segment(self) -> Segment | None:
        """The one that is open."""
        return None if self._writer is None else self._writer.segment

    @property
    def file_bytes(self) -> int:
        """Of segments, and of what was set aside."""
        return self._ledger.file_bytes + self.aside.num_bytes

    @property
    def num_free(self) -> int:
        """Records that may be appended to it."""
        usable = self._writer is not None and self._space.has_spare(self.file_bytes)
        return self._writer.num_free if self._writer is not None and usable else 0

    @property
    def _most(self) -> int:
        return max(1, MAX_WRITE_BYTES // self._shape.record_bytes)

    def append(self, records: Sequence[Record]) -> list[int]:
        """Their places. All or none. Raises KVError, DiskFull, DiskFailed."""
        payloads = [_payload(record, self._shape.block_bytes) for record in records]
        places: list[int] = []
        try:
            while (done := len(places)) < len(records):
                writer = self._open(compacting=False)
                stop = done + min(len(records) - done, writer.num_free, self._most)
                places += self._write(writer, records[done:stop], payloads[done:stop])
        except BaseException:
            self._journal.note(self._ledger.bury(places, forgotten=False))
            self._ledger.release(places)
            raise
        return places

    def _write(self, writer: SegmentWriter, records: Sequence[Record], payloads: Sequence[memoryview]) -> list[int]:
        serials = range(self._next_serial, self._next_serial + len(records))
        self._next_serial = serials.stop
        headers = [
            RecordHeader(s, r.hash, r.parent, r.depth, r.tenant, r.conversation, payload_sum(p))
            for s, r, p in zip(serials, records, payloads, strict=True)
        ]
        with self._writing(writer, serials):
            first = writer.write(headers, payloads)
            self._count(len(records))
        return self._ledger.adopt(writer.segment, first, serials)

    def copy(self, headers: Sequence[RecordHeader], raw: Sequence[memoryview], moved: Sequence[Location]) -> int:
        """Verified records of another segment, as they lie in it; how many of them still lived and are here now.
        Raises DiskFull, DiskFailed: those before are moved."""
        done = num_moved = 0
        while done < len(moved):
            writer = self._open(compacting=True)
            stop = done + min(len(moved) - done, writer.num_free, self._most)
            # Copies keep their serials: were these noted as dead, so would be what they are copies of.
            with self._writing(writer, ()):
                first = writer.copy(headers[done:stop], raw[done:stop])
                self._count(stop - done)
            num_moved += self._ledger.move(moved[done:stop], writer.segment, first)
            done = stop
        return num_moved

    @contextmanager
    def _writing(self, writer: SegmentWriter, serials: Sequence[int]) -> Iterator[None]:
        try:
            yield
        except DiskFull:
            self._journal.note(list(serials))  # some may be whole, and would be found at the next opening
            raise
        except DiskFailed:
            # Whatever it is, it is where this file lies, or it will fail again.
            self._journal.note(list(serials))
            self._retire(seal=False)
            raise

    def _count(self, num_records: int) -> None:
        self._unsynced_bytes += num_records * self._shape.record_bytes
        if self._unsynced_bytes >= self._sync_bytes:
            self.sync()

    def sync(self) -> None:
        """All that was written is on the device. Raises DiskFailed."""
        if self._writer is not None and self._unsynced_bytes:
            try:
                self._writer.file.datasync()
            except DiskFailed:
                self._retire(seal=False)  # a second try would say that all is well, and it isn't
                raise
        self._unsynced_bytes = 0

    def _open(self, *, compacting: bool) -> SegmentWriter:
        """A segment with a free slot. Raises DiskFull, DiskFailed."""
        if self._writer is not None and not self._writer.num_free:
            self.retire()
        # A segment that compaction has begun in the room kept for it is not for others until it has given some back.
        if self._writer is None or not (compacting or self._space.has_spare(self.file_bytes)):
            self._require_room(compacting=compacting)
        if self._writer is None:
            self._writer = SegmentWriter.create(
                self._folder, self._layout, self._next_number, self._space.segment_bytes, direct=self._files.direct
            )
            self._next_number += 1
            self._files.put(self._writer.file)
            self._ledger.add(self._writer.segment)
        return self._writer

    def _require_room(self, *, compacting: bool) -> None:
        while True:
            try:
                self._space.require(self.file_bytes, compacting=compacting, new=self._writer is None)
                return
            except DiskFull:
                if not self.drop_dead() and not self.aside.remove_oldest():
                    raise

    def retire(self) -> None:
        """Nothing more into the segment that is open, which gets its index."""
        self._retire(seal=True)

    def _retire(self, *, seal: bool) -> None:
        if self._writer is None:
            return
        writer, self._writer, self._unsynced_bytes = self._writer, None, 0
        file_bytes = writer.segment.file_bytes
        if seal and writer.segment.num_records:
            try:
                file_bytes = writer.seal()
            except (DiskFull, DiskFailed) as e:
                log.warning("%s could not be given an index: %s", writer.segment.path, e)
        self._ledger.close(writer.segment, file_bytes)

    def look(self) -> None:
        """What the file system has room for. Raises DiskFailed."""
        self._space.look(self.file_bytes)

    def drop_dead(self) -> int:
        """Files without a living block go; the bytes that they took. Raises DiskFailed."""
        freed = 0
        for segment in self._ledger.segments():
            if segment.num_live or segment is self.segment:
                continue
            self.sync()  # what was moved out of it must be safe where it is now
            freed += segment.file_bytes
            self._ledger.remove(segment)
            self._files.drop(segment.path)
            self._remove(segment)
        if freed:
            sync_folder(self._folder)
        return freed

    def _remove(self, segment: Segment) -> None:
        if segment.damage:
            self.aside.damaged(segment.path, segment.damage)
        else:
            with typed(segment.path, "remove"):
                segment.path.unlink(missing_ok=True)


def _payload(record: Record, block_bytes: int) -> memoryview:
    given = record.payload
    payload = (given.data if isinstance(given, np.ndarray) else given).cast("B")
    if len(payload) != block_bytes:
        raise KVError(f"a block of {len(payload)} bytes, must be {block_bytes}", size_bytes=len(payload))
    if len(record.hash) != 32 or len(record.parent) != 32:
        raise KVError("a record's hash and its parent's have 32 bytes each", size_bytes=len(record.hash))
    check_names(record.tenant, record.conversation)
    return payload
