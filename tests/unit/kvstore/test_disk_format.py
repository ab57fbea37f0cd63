"""Bytes of the disk tier's files: what is read is what was written, or refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.errors import ConfigError
from distserve.messages import KVLayout
from distserve_kvstore.disk.format import (
    ALIGN,
    HEADER_BYTES,
    MAX_CONVERSATION_BYTES,
    MAX_SEGMENT_HEADER,
    MAX_TENANT_BYTES,
    Damaged,
    Foreign,
    RecordHeader,
    Shape,
    parse_record_header,
    parse_segment_header,
    put_record_header,
    segment_header,
)
from distserve_kvstore.disk.index_format import Index, index_bytes, parse_index, parse_trailer
from tests.unit.kvstore.stored_blocks import ALIGNED, ODD

words = st.integers(0, 2**64 - 1)
hashes = st.binary(min_size=32, max_size=32)
headers = st.builds(
    RecordHeader,
    serial=words,
    hash=hashes,
    parent=hashes,
    depth=st.integers(0, 2**32 - 1),
    tenant=st.text(max_size=MAX_TENANT_BYTES // 4),
    conversation=st.text(max_size=MAX_CONVERSATION_BYTES // 4),
    payload_sum=words,
)


@given(headers, words, st.integers(0, 2**40))
def test_a_records_header_says_what_was_put_there(header, salt, num_bytes):
    raw = memoryview(bytearray(b"\xff" * HEADER_BYTES))
    put_record_header(raw, header, num_bytes, salt)
    assert parse_record_header(raw, num_bytes, salt) == header
    for wrong in ((num_bytes + 1, salt), (num_bytes, salt ^ 1)):
        with pytest.raises(Damaged):
            parse_record_header(raw, *wrong)


@given(headers, st.integers(0, 8 * HEADER_BYTES - 1))
def test_any_bit_of_a_records_header_counts(header, bit):
    raw = bytearray(HEADER_BYTES)
    put_record_header(memoryview(raw), header, 8192, 7)
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged):
        parse_record_header(memoryview(raw), 8192, 7)


@given(st.integers(0, 8 * ALIGN - 1))
def test_any_bit_of_a_segments_header_counts(bit):
    raw = bytearray(segment_header(ALIGNED, 3, 12345))
    found = parse_segment_header(bytes(raw))
    assert (found.number, found.salt, found.layout) == (3, 12345, ALIGNED)
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises((Damaged, Foreign)):
        parse_segment_header(bytes(raw))


def test_another_version_and_another_kind_are_named():
    raw = bytearray(segment_header(ALIGNED, 3, 12345))
    newer = bytes(raw[:8]) + (2).to_bytes(4, "little") + bytes(raw[12:])
    with pytest.raises(Foreign, match="format version 2, this is 1"):
        parse_segment_header(newer)
    with pytest.raises(Foreign, match="begins with b'GIF89a"):
        parse_segment_header(b"GIF89a" + bytes(5000))
    with pytest.raises(Damaged, match="3 bytes"):
        parse_segment_header(b"abc")


def test_numbers_are_little_endian():
    raw = segment_header(ALIGNED, 0x0102030405060708, 0)
    assert raw[:12] == b"DSKVSEGM\x01\x00\x00\x00"
    assert raw[16:24] == bytes(range(8, 0, -1))


def test_a_long_layout_makes_a_longer_header_and_an_absurd_one_is_refused():
    long = KVLayout(
        weights="w", dtype="bfloat16", num_layers=1, num_kv_heads=1, head_dim=8, block_size=1, rope="r" * 9000
    )
    raw = segment_header(long, 1, 2)
    assert len(raw) == 3 * ALIGN
    assert Shape.of(long).header_bytes == 3 * ALIGN
    assert parse_segment_header(raw).layout == long
    absurd = KVLayout("w", "bfloat16", 1, 1, 8, 1, "r" * MAX_SEGMENT_HEADER)
    with pytest.raises(ConfigError, match="as JSON, must be under"):
        segment_header(absurd, 1, 2)


@given(st.lists(headers, max_size=5), words, st.data())
def test_an_index_gives_its_records_back_or_is_refused(some, salt, data):
    index = Index(len(some))
    for slot, header in enumerate(some):
        index.put(slot, header)
    raw = bytearray(index_bytes(index.entries, index.strings, 4096, salt))
    trailer = parse_trailer(memoryview(raw)[-ALIGN:], salt)
    entries, strings = parse_index(memoryview(raw), trailer, salt)
    back = [
        RecordHeader(
            int(e["serial"]),
            e["hash"].tobytes(),
            e["parent"].tobytes(),
            int(e["depth"]),
            strings[e["tenant"]],
            strings[e["conversation"]],
            int(e["sum"]),
        )
        for e in entries
    ]
    assert back == some
    used = trailer.entries_bytes + trailer.strings_bytes
    at = data.draw(st.one_of(st.integers(0, max(0, used - 1)), st.integers(len(raw) - ALIGN, len(raw) - 1)))
    if at < used or at >= len(raw) - ALIGN:
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(Damaged):
            parse_index(memoryview(raw), parse_trailer(memoryview(raw)[-ALIGN:], salt), salt)


def test_everything_begins_where_direct_io_can():
    for layout in (ALIGNED, ODD):
        shape = Shape.of(layout)
        assert shape.offset(0) % ALIGN == shape.record_bytes % ALIGN == 0
        n = shape.num_slots(1 << 20)
        index = index_bytes(np.zeros(n, Index(0).entries.dtype), [], 0, 0)
        assert shape.offset(n) + len(index) <= 1 << 20
