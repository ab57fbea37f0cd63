"""The segment that is being written: records in with few writes, an index at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distserve.messages import KVLayout
from distserve_kvstore.disk.files import BlockFile, Scratch, is_aligned, sync_folder, typed
from distserve_kvstore.disk.format import (
    ALIGN,
    HEADER_BYTES,
    RecordHeader,
    Shape,
    put_record_header,
    seal,
    segment_header,
)
from distserve_kvstore.disk.index_format import Index, index_bytes
from distserve_kvstore.disk.segment import NOWHERE, Segment, segment_path

MAX_WRITE_BYTES = 32 << 20  # at once: what a crash of the machine may tear beyond sync_bytes
_COPY_BYTES = 8 << 20  # at once, where payloads must be copied to aligned memory

_scratch = Scratch()


class SegmentWriter:
    """Owner of the end of one segment. Belongs to the tier's writers' lock."""

    def __init__(self, segment: Segment, file: BlockFile, shape: Shape) -> None:
        self.segment = segment
        self.file = file
        self._shape = shape
        self._index = Index(segment.num_slots)

    @classmethod
    def create(cls, folder: Path, layout: KVLayout, number: int, segment_bytes: int, *, direct: bool) -> SegmentWriter:
        """A new file with its space, if the file system can promise it. Raises DiskFull, DiskFailed: nothing is left
        of it then."""
        shape = Shape.of(layout)
        num_slots = shape.num_slots(segment_bytes)
        salt = int.from_bytes(os.urandom(8), "little")
        path = segment_path(folder, number)
        born = path.with_suffix(".tmp")  # it gets its name with its header: no segment is ever without
        with typed(born, "remove"):
            born.unlink(missing_ok=True)
        try:
            file = BlockFile(born, create=True, direct=direct)
            file.allocate(max(segment_bytes, shape.offset(num_slots)))
            header = _scratch.take(shape.header_bytes)
            header[:] = segment_header(layout, number, salt)
            file.write([header], 0)
            file_bytes = file.num_bytes
            with typed(path, "create"):
                born.rename(path)
            file.path = path
            sync_folder(folder)
        except BaseException:
            for leftover in (born, path):
                with suppress(OSError):
                    leftover.unlink()
            raise
        place_of = np.full(num_slots, NOWHERE, np.int32)
        return cls(Segment(number, salt, path, place_of, file_bytes=file_bytes), file, shape)

    @property
    def num_free(self) -> int:
        """Slots."""
        return self.segment.num_slots - self.segment.num_records

    def write(self, headers: Sequence[RecordHeader], payloads: Sequence[memoryview]) -> int:
        """Records in the next slots; the first one's. Nothing counts until Segment.adopt(): what failed is written
        over. At most num_free of them, and MAX_WRITE_BYTES. Raises DiskFull, DiskFailed."""
        first, shape = self.segment.num_records, self._shape
        if not self.file.direct or all(is_aligned(p) for p in payloads):
            self._write_straight(first, headers, payloads)
        else:
            a_copy = max(1, _COPY_BYTES // shape.record_bytes)
            for i in range(0, len(headers), a_copy):
                self._write_copied(first + i, headers[i : i + a_copy], payloads[i : i + a_copy])
        for i, header in enumerate(headers):
            self._index.put(first + i, header)
        return first

    def _write_straight(self, slot: int, headers: Sequence[RecordHeader], payloads: Sequence[memoryview]) -> None:
        shape = self._shape
        filling = bytes(shape.record_bytes - HEADER_BYTES - shape.block_bytes)
        scratch = _scratch.take(len(headers) * HEADER_BYTES)
        buffers: list[memoryview] = []
        for i, (header, payload) in enumerate(zip(headers, payloads, strict=True)):
            raw = scratch[i * HEADER_BYTES : (i + 1) * HEADER_BYTES]
            put_record_header(raw, header, shape.block_bytes, self.segment.salt)
            buffers += [raw, payload, memoryview(filling)] if filling else [raw, payload]
        self.file.write(buffers, shape.offset(slot))

    def _write_copied(self, slot: int, headers: Sequence[RecordHeader], payloads: Sequence[memoryview]) -> None:
        shape = self._shape
        raw = _scratch.take(len(headers) * shape.record_bytes)
        for i, (header, payload) in enumerate(zip(headers, payloads, strict=True)):
            record = raw[i * shape.record_bytes : (i + 1) * shape.record_bytes]
            put_record_header(record[:HEADER_BYTES], header, shape.block_bytes, self.segment.salt)
            stop = HEADER_BYTES + shape.block_bytes
            record[HEADER_BYTES:stop] = payload
            record[stop:] = bytes(shape.record_bytes - stop)
        self.file.write([raw], shape.offset(slot))

    def copy(self, headers: Sequence[RecordHeader], raw: Sequence[memoryview]) -> int:
        """Verified records of another segment, as they lie there (aligned; their headers are made this one's); as
        write()."""
        first = self.segment.num_records
        for record in raw:
            seal(record[:HEADER_BYTES], self.segment.salt)
        self.file.write(raw, self._shape.offset(first))
        for i, header in enumerate(headers):
            self._index.put(first + i, header)
        return first

    def seal(self) -> int:
        """Index and trailer behind the last record, and the file cut there; its bytes. Raises DiskFull, DiskFailed:
        the segment is then as good as before, only slower to open."""
        self.file.datasync()
        num = self.segment.num_records
        return write_index(self.file, self._shape, self._index.entries[:num], self._index.strings, self.segment.salt)


def write_index(file: BlockFile, shape: Shape, entries: npt.NDArray[np.void], strings: Sequence[str], salt: int) -> int:
    """Seals a file that has records for all entries; its bytes. Raises DiskFull, DiskFailed."""
    offset = shape.offset(len(entries))
    raw = index_bytes(entries, strings, offset, salt)
    buffer = _scratch.take(len(raw))
    buffer[:] = raw
    file.write([buffer], offset)
    file.truncate(offset + len(raw))
    file.datasync()
    assert len(raw) % ALIGN == 0
    return offset + len(raw)
