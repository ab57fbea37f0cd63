"""Records out of a segment's file, checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distserve_kvstore.disk.files import BlockFile, Scratch, is_aligned
from distserve_kvstore.disk.format import HEADER_BYTES, Damaged, RecordHeader, Shape, parse_record_header, payload_sum

CHUNK_BYTES = 8 << 20  # at a time, where bytes are copied

_scratch = Scratch()


def read_run(
    file: BlockFile, shape: Shape, salt: int, slot: int, into: Sequence[memoryview]
) -> list[RecordHeader | Damaged]:
    """Neighbouring records from `slot` on, one payload into each buffer (uint8 [block_bytes]); of each its header if
    header and payload are what was written. Raises DiskFailed."""
    if file.direct and not all(is_aligned(b) for b in into):
        return _read_copied(file, shape, salt, slot, into)
    filling = shape.record_bytes - HEADER_BYTES - shape.block_bytes
    scratch = _scratch.take((len(into) + 1) * HEADER_BYTES)
    headers = [scratch[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(len(into))]
    waste = [scratch[-HEADER_BYTES:][:filling]] if filling else []
    buffers = [part for i, b in enumerate(into) for part in (headers[i], b, *waste)]
    num_whole = file.read(buffers, shape.offset(slot)) // shape.record_bytes
    return [check_record(headers[i], b, salt) if i < num_whole else _ends() for i, b in enumerate(into)]


def _read_copied(
    file: BlockFile, shape: Shape, salt: int, slot: int, into: Sequence[memoryview]
) -> list[RecordHeader | Damaged]:
    found: list[RecordHeader | Damaged] = []
    for record in raw_records(file, shape, salt, range(slot, slot + len(into))):
        if not isinstance(record, Damaged):
            into[len(found)][:] = record[1]
            found.append(record[0])
        else:
            found.append(record)
    return found


def raw_records(
    file: BlockFile, shape: Shape, salt: int, slots: range
) -> Iterator[tuple[RecordHeader, memoryview] | Damaged]:
    """Neighbouring records, checked: header, and payload in memory that is the caller's until the next one is asked
    for. Raises DiskFailed."""
    for raw in raw_chunks(file, shape, slots):
        for record in raw:
            if record is None:
                yield _ends()
                continue
            payload = record[HEADER_BYTES : HEADER_BYTES + shape.block_bytes]
            checked = check_record(record[:HEADER_BYTES], payload, salt)
            yield checked if isinstance(checked, Damaged) else (checked, payload)


def raw_chunks(file: BlockFile, shape: Shape, slots: range) -> Iterator[list[memoryview | None]]:
    """Neighbouring records as they lie there, unchecked, up to CHUNK_BYTES of them at a time in one piece of aligned
    memory, which is the caller's until the next chunk is asked for; None where the file ends. Raises DiskFailed."""
    a_chunk = max(1, CHUNK_BYTES // shape.record_bytes)
    for first in range(slots.start, slots.stop, a_chunk):
        count = min(a_chunk, slots.stop - first)
        raw = _scratch.take(count * shape.record_bytes)
        num_whole = file.read([raw], shape.offset(first)) // shape.record_bytes
        yield [
            raw[i * shape.record_bytes : (i + 1) * shape.record_bytes] if i < num_whole else None for i in range(count)
        ]


def check_record(header: memoryview, payload: memoryview, salt: int) -> RecordHeader | Damaged:
    """Its header, if both are whole."""
    try:
        parsed = parse_record_header(header, len(payload), salt)
    except Damaged as e:
        return e
    return parsed if payload_sum(payload) == parsed.payload_sum else Damaged("its checksum is wrong")


def _ends() -> Damaged:
    return Damaged("the file ends before it")
