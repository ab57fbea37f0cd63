"""A segment's index, as it gathers and as bytes with its trailer (format.py has the rest): pure, apart from I/O."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from distserve.kv.hashing import HASH_BYTES
from distserve_kvstore.disk.format import ALIGN, ENTRY_BYTES, VERSION, Damaged, RecordHeader, aligned, is_sealed, seal

_TRAILER = struct.Struct("<8sIIQQQQ")  # magic, version, records, offset, bytes of entries, bytes of strings, sum
_TRAILER_MAGIC = b"DSKVINDX"

# One record in a sealed segment's index. serial 0: none is there (a write that was cut off).
ENTRY = np.dtype(
    [
        ("hash", "u1", HASH_BYTES),
        ("parent", "u1", HASH_BYTES),
        ("serial", "<u8"),
        ("sum", "<u8"),
        ("depth", "<u4"),
        ("tenant", "<u4"),  # number of a string
        ("conversation", "<u4"),
        ("spare", "<u4"),
    ]
)

_ENTRY = struct.Struct("<32s32sQQIIII")  # the same
assert _ENTRY.size == ENTRY.itemsize == ENTRY_BYTES


class Index:
    """Entries and strings of a segment's index, as they gather. Packed, which is several times as fast as by the
    array's fields."""

    def __init__(self, num_slots: int) -> None:
        self._raw = bytearray(num_slots * ENTRY.itemsize)
        self._entries: npt.NDArray[np.void] = np.frombuffer(self._raw, ENTRY)
        self._strings: dict[str, int] = {}
        self._num = 0

    def put(self, slot: int, header: RecordHeader) -> None:
        _ENTRY.pack_into(
            self._raw,
            slot * _ENTRY.size,
            header.hash,
            header.parent,
            header.serial,
            header.payload_sum,
            header.depth,
            self._number(header.tenant),
            self._number(header.conversation),
            0,
        )
        self._num = max(self._num, slot + 1)

    def cut(self) -> None:
        """Empty slots at the end are none of it."""
        there = np.flatnonzero(self.entries["serial"])
        self._num = int(there[-1]) + 1 if len(there) else 0

    def _number(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    @property
    def entries(self) -> npt.NDArray[np.void]:
        """ENTRY [records]."""
        return self._entries[: self._num]

    @property
    def strings(self) -> list[str]:
        return list(self._strings)


def index_bytes(entries: npt.NDArray[np.void], strings: Sequence[str], offset: int, salt: int) -> bytes:
    """Index and trailer, as they stand at `offset` to the end of the file. entries: ENTRY [records]."""
    body = entries.tobytes()
    text = msgspec.json.encode(list(strings))
    raw = bytearray(aligned(len(body) + len(text)) + ALIGN)
    raw[: len(body)] = body
    raw[len(body) : len(body) + len(text)] = text
    trailer = memoryview(raw)[-ALIGN:]
    _TRAILER.pack_into(
        trailer,
        0,
        _TRAILER_MAGIC,
        VERSION,
        len(entries),
        offset,
        len(body),
        len(text),
        xxh3_64_intdigest(memoryview(raw)[: len(body) + len(text)], salt),
    )
    seal(trailer, salt)
    return bytes(raw)


@dataclass(frozen=True, slots=True)
class Trailer:
    num_records: int
    offset: int
    entries_bytes: int
    strings_bytes: int
    index_sum: int


def parse_trailer(raw: memoryview, salt: int) -> Trailer:
    """raw: a file's last ALIGN bytes. Raises Damaged if they are no trailer."""
    if len(raw) != ALIGN or not is_sealed(raw, salt):
        raise Damaged("it has no index")
    magic, version, count, offset, entries, strings, index_sum = _TRAILER.unpack_from(raw)
    if magic != _TRAILER_MAGIC or version != VERSION or entries != count * ENTRY.itemsize:
        raise Damaged("its index is of another kind")
    return Trailer(count, offset, entries, strings, index_sum)


def parse_index(raw: memoryview, trailer: Trailer, salt: int) -> tuple[npt.NDArray[np.void], list[str]]:
    """raw: what is at the trailer's offset. Entries and strings. Raises Damaged."""
    body = raw[: trailer.entries_bytes + trailer.strings_bytes]
    if xxh3_64_intdigest(body, salt) != trailer.index_sum:
        raise Damaged("its index's checksum is wrong")
    entries = np.frombuffer(body[: trailer.entries_bytes], ENTRY).copy()
    return entries, msgspec.json.decode(bytes(body[trailer.entries_bytes :]), type=list[str])
