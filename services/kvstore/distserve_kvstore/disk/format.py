"""Bytes of the disk tier's files, version 1: pure, apart from I/O. All numbers are little-endian.

    00000007.seg                        a segment: blocks of one layout, appended
      segment header                    magic, version, its length, number, salt, layout's fingerprint, layout as JSON
      record 0, record 1, …             each as long as the others
        record header    4096           magic, version, depth, serial, length, checksum, hash, parent, tenant,
                                        conversation
        payload          block_bytes    filled up to a multiple of 4096
      index                             of a sealed segment: one entry a record, then the strings they name
      trailer          4096             of a sealed segment: where its index is, its checksum

Everything begins at multiples of 4096, for direct I/O. Headers and trailers end with an xxh3 of themselves, seeded with
the segment's salt (a random number; 0 for the segment's own header), so that what is left of another file is never
taken for a part of this one. Payloads have their xxh3 in the record's header and in the index.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
from xxhash import xxh3_64_intdigest

from distserve.errors import ConfigError, KVError
from distserve.kv.layout import block_bytes, fingerprint
from distserve.messages import KVLayout

VERSION = 1
ALIGN = 4096
HEADER_BYTES = ALIGN  # of a record
ENTRY_BYTES = 96  # of a record in an index (index_format.py)
MAX_TENANT_BYTES = 256
MAX_CONVERSATION_BYTES = 1024

_SUM = struct.Struct("<Q")
# Magic, version, header's length, number, salt, block_bytes, fingerprint, length of the JSON.
_SEGMENT = struct.Struct("<8sIIQQQ32sI")
# Magic, version, depth, serial, payload's length, its sum, hash, parent, lengths of tenant and conversation.
_RECORD = struct.Struct("<8sIIQQQ32s32sHH")
_SEGMENT_MAGIC, _RECORD_MAGIC = b"DSKVSEGM", b"DSKVBLCK"
MAX_SEGMENT_HEADER = 16 * ALIGN


class Foreign(Exception):
    """Whole, but not ours: another layout, another version, another kind of file."""


class Damaged(Exception):
    """Not what was written."""


def aligned(num_bytes: int) -> int:
    """Rounded up to a multiple of ALIGN."""
    return -(-num_bytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths, in bytes, of the parts of a segment for one layout."""

    block_bytes: int
    header_bytes: int  # of the segment

    @classmethod
    def of(cls, layout: KVLayout) -> Shape:
        return cls(block_bytes(layout), len(segment_header(layout, 0, 0)))

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + aligned(self.block_bytes)

    def offset(self, slot: int) -> int:
        """Where record `slot` begins."""
        return self.header_bytes + slot * self.record_bytes

    def num_slots(self, segment_bytes: int) -> int:
        """Records that a file of about so many bytes takes, its index included; at least 1."""
        index = 2 * ENTRY_BYTES  # an entry, and as much again for its strings
        return max(1, (segment_bytes - self.header_bytes - 2 * ALIGN) // (self.record_bytes + index))


# ---------------------------------------------------------------- a segment's header


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    number: int
    salt: int
    layout: KVLayout
    header_bytes: int


def segment_header(layout: KVLayout, number: int, salt: int) -> bytes:
    """Raises ConfigError if the layout's text is absurdly long."""
    text = msgspec.json.encode(layout)
    length = aligned(_SEGMENT.size + len(text) + _SUM.size)
    if length > MAX_SEGMENT_HEADER:
        raise ConfigError(
            f"the KV layout takes {len(text)} bytes as JSON, must be under {MAX_SEGMENT_HEADER}",
            key="layout",
            value=len(text),
            expected=f"< {MAX_SEGMENT_HEADER}",
        )
    raw = bytearray(length)
    digest = bytes.fromhex(fingerprint(layout))
    _SEGMENT.pack_into(raw, 0, _SEGMENT_MAGIC, VERSION, length, number, salt, block_bytes(layout), digest, len(text))
    raw[_SEGMENT.size : _SEGMENT.size + len(text)] = text
    seal(memoryview(raw), 0)
    return bytes(raw)


def parse_segment_header(raw: bytes | memoryview) -> SegmentHeader:
    """raw: a file's first bytes, up to MAX_SEGMENT_HEADER of them. Raises Foreign, Damaged."""
    if len(raw) < _SEGMENT.size:
        raise Damaged(f"has {len(raw)} bytes, less than a header")
    magic, version, length, number, salt, num_bytes, digest, text_bytes = _SEGMENT.unpack_from(raw)
    if magic != _SEGMENT_MAGIC:
        raise Foreign(f"begins with {bytes(magic)!r}, not {_SEGMENT_MAGIC!r}")
    if version != VERSION:
        raise Foreign(f"has format version {version}, this is {VERSION}")
    if length % ALIGN or not _SEGMENT.size <= length <= min(len(raw), MAX_SEGMENT_HEADER):
        raise Damaged(f"its header says that it has {length} bytes")
    if not is_sealed(memoryview(raw)[:length], 0):
        raise Damaged("its header's checksum is wrong")
    try:
        layout = msgspec.json.decode(bytes(raw[_SEGMENT.size : _SEGMENT.size + text_bytes]), type=KVLayout)
    except msgspec.MsgspecError as e:
        raise Foreign(f"its layout can't be read: {e}") from e
    if bytes.fromhex(fingerprint(layout)) != digest or block_bytes(layout) != num_bytes:
        raise Foreign("its layout and its fingerprint are not of each other")
    return SegmentHeader(number, salt, layout, length)


# ---------------------------------------------------------------- a record's header


@dataclass(frozen=True, slots=True)
class RecordHeader:
    serial: int  # grows with each record of the folder; a copy made by compaction keeps it
    hash: bytes
    parent: bytes
    depth: int
    tenant: str
    conversation: str
    payload_sum: int


def check_names(tenant: str, conversation: str) -> None:
    """Raises KVError for names that don't fit into a header."""
    for what, text, limit in (
        ("tenant", tenant, MAX_TENANT_BYTES),
        ("conversation", conversation, MAX_CONVERSATION_BYTES),
    ):
        if len(text.encode()) > limit:
            raise KVError(f"a {what} of {len(text.encode())} bytes, at most {limit} can be stored", field=what)


def put_record_header(into: memoryview, record: RecordHeader, num_bytes: int, salt: int) -> None:
    """into: uint8 [HEADER_BYTES], of whatever."""
    tenant, conversation = record.tenant.encode(), record.conversation.encode()
    _RECORD.pack_into(
        into,
        0,
        _RECORD_MAGIC,
        VERSION,
        record.depth,
        record.serial,
        num_bytes,
        record.payload_sum,
        record.hash,
        record.parent,
        len(tenant),
        len(conversation),
    )
    names = tenant + conversation
    stop = _RECORD.size + len(names)
    into[_RECORD.size : stop] = names
    into[stop:HEADER_BYTES] = bytes(HEADER_BYTES - stop)
    seal(into, salt)


def parse_record_header(raw: memoryview, num_bytes: int, salt: int) -> RecordHeader:
    """raw: uint8 [HEADER_BYTES]. num_bytes: what its payload must have. Raises Damaged."""
    if not is_sealed(raw, salt):
        raise Damaged("its header's checksum is wrong")
    magic, version, depth, serial, length, payload_sum, hash_, parent, tenant, conversation = _RECORD.unpack_from(raw)
    if magic != _RECORD_MAGIC or version != VERSION or length != num_bytes:
        raise Damaged(f"its header is of {length} bytes and version {version}")
    names = bytes(raw[_RECORD.size : _RECORD.size + tenant + conversation])
    return RecordHeader(serial, hash_, parent, depth, names[:tenant].decode(), names[tenant:].decode(), payload_sum)


def payload_sum(payload: memoryview) -> int:
    """xxh3 of a block's bytes."""
    return xxh3_64_intdigest(payload)


def seal(raw: memoryview, salt: int) -> None:
    """Its checksum into its last bytes; again, to make a verified header one of another segment's."""
    _SUM.pack_into(raw, len(raw) - _SUM.size, xxh3_64_intdigest(raw[: -_SUM.size], salt))


def is_sealed(raw: memoryview, salt: int) -> bool:
    """Whether it is what seal() left."""
    (found,) = _SUM.unpack_from(raw, len(raw) - _SUM.size)
    return bool(found == xxh3_64_intdigest(raw[: -_SUM.size], salt))
