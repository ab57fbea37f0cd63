"""One segment's file as it is found: what is in it, or why it is set aside."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distserve.errors import DiskFailed, DiskFull
from distserve.kv.layout import fingerprint
from distserve.messages import KVLayout
from distserve_kvstore.disk.files import BlockFile
from distserve_kvstore.disk.format import (
    ALIGN,
    HEADER_BYTES,
    MAX_SEGMENT_HEADER,
    Damaged,
    Foreign,
    SegmentHeader,
    Shape,
    aligned,
    parse_record_header,
    parse_segment_header,
)
from distserve_kvstore.disk.index_format import ENTRY, Index, parse_index, parse_trailer
from distserve_kvstore.disk.segment_reads import raw_chunks, raw_records
from distserve_kvstore.disk.segment_writer import write_index

log = logging.getLogger(__name__)

_SKIP_BYTES = 128 << 10  # what a disk reads in the time of one more request


@dataclass(frozen=True, slots=True)
class Loaded:
    """entries: ENTRY [records]; those with serial 0 are none. num_dropped: records that were begun and not whole."""

    path: Path
    header: SegmentHeader
    entries: npt.NDArray[np.void]
    strings: Sequence[str]
    file_bytes: int
    is_sealed: bool
    num_dropped: int = 0


def load(path: Path, layout: KVLayout, *, direct: bool, tail_bytes: int) -> Loaded:
    """By its index; without one, by its records' headers, of which those in the last tail_bytes must be whole blocks.

    Raises Foreign, Damaged (set it aside), DiskFailed.
    """
    file = BlockFile(path, direct=direct)
    num_bytes = file.num_bytes
    header = _header(file, layout)
    shape = Shape.of(layout)
    try:
        entries, strings = _index(file, shape, header.salt, num_bytes)
        return Loaded(path, header, entries, strings, num_bytes, is_sealed=True)
    except Damaged as e:
        log.info("%s: %s; its records are looked at one by one", path, e)
    scanned = _scan(file, shape, header.salt, num_bytes, tail_bytes)
    num_found = int(np.count_nonzero(scanned.entries["serial"]))
    whole = _verified(file, shape, header.salt, scanned, tail_bytes)
    num_whole = int(np.count_nonzero(whole.entries["serial"]))
    return Loaded(path, header, whole.entries, whole.strings, num_bytes, False, num_found - num_whole)


def seal(found: Loaded, shape: Shape, *, direct: bool) -> Loaded:
    """A segment without an index gets one, and is cut behind its last record, so that it opens fast the next time.
    What can't be done now is left undone."""
    try:
        file = BlockFile(found.path, direct=direct)
        file_bytes = write_index(file, shape, found.entries, found.strings, found.header.salt)
    except (DiskFull, DiskFailed) as e:
        log.warning("%s could not be given an index: %s", found.path, e)
        return found
    return replace(found, file_bytes=file_bytes, is_sealed=True)


def _header(file: BlockFile, layout: KVLayout) -> SegmentHeader:
    raw = _buffer(MAX_SEGMENT_HEADER)
    header = parse_segment_header(raw[: file.read([raw], 0)])
    if header.layout != layout:
        raise Foreign(
            f"it holds blocks of layout {fingerprint(header.layout)[:16]} (weights {header.layout.weights}), "
            f"not {fingerprint(layout)[:16]} (weights {layout.weights})"
        )
    return header


def _index(file: BlockFile, shape: Shape, salt: int, num_bytes: int) -> tuple[npt.NDArray[np.void], list[str]]:
    if num_bytes % ALIGN or num_bytes < shape.header_bytes + ALIGN:
        raise Damaged("it has no index")
    raw = _buffer(ALIGN)
    trailer = parse_trailer(raw[: file.read([raw], num_bytes - ALIGN)], salt)
    length = aligned(trailer.entries_bytes + trailer.strings_bytes)
    if trailer.offset != shape.offset(trailer.num_records) or trailer.offset + length + ALIGN != num_bytes:
        raise Damaged("its length is not what its index says")
    body = _buffer(max(length, ALIGN))[:length]
    return parse_index(body[: file.read([body], trailer.offset)], trailer, salt)


def _scan(file: BlockFile, shape: Shape, salt: int, num_bytes: int, tail_bytes: int) -> Index:
    """Every record whose header is whole, in its slot. A gap longer than the tail is the end: before what is not synced
    there are none."""
    num_slots = max(0, num_bytes - shape.header_bytes) // shape.record_bytes
    longest_gap = max(1, -(-tail_bytes // shape.record_bytes))
    index = Index(num_slots)
    for slot, raw in enumerate(_headers(file, shape, num_slots)):
        try:
            index.put(slot, parse_record_header(raw, shape.block_bytes, salt))
        except Damaged:  # not written, or not whole: none is there
            if slot - len(index.entries) >= longest_gap:
                break
    return index


def _headers(file: BlockFile, shape: Shape, num_slots: int) -> Iterator[memoryview]:
    """Of each record, until the next one is asked for. Where records are small, reading all is faster than skipping."""
    if shape.record_bytes <= _SKIP_BYTES:
        for chunk in raw_chunks(file, shape, range(num_slots)):
            yield from (record[:HEADER_BYTES] for record in chunk if record is not None)
        return
    raw = _buffer(HEADER_BYTES)
    for slot in range(num_slots):
        file.read([raw], shape.offset(slot))
        yield raw


def _verified(file: BlockFile, shape: Shape, salt: int, index: Index, tail_bytes: int) -> Index:
    """Without those of the last tail_bytes whose payload is not whole."""
    num = len(index.entries)
    first = max(0, num - max(1, -(-tail_bytes // shape.record_bytes)))
    for slot, record in enumerate(raw_records(file, shape, salt, range(first, num)), first):
        if isinstance(record, Damaged):
            index.entries[slot] = np.zeros((), ENTRY)
    index.cut()
    return index


def _buffer(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))
