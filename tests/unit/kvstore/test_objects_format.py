"""Bytes and names of objects: what is read is what was put, or refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.errors import KVError
from distserve.messages.store import MAX_DEPTH
from distserve_kvstore.objects import ObjectRun
from distserve_kvstore.objects.format import HEADER_BYTES, Kind, NotServed, encode, parse_header, take_blocks

KIND = Kind("ab" * 32, 64)
hashes = st.binary(min_size=32, max_size=32)


def run_of(n: int, tenant: str = "", conversation: str = "", start: int = 0, seed: int = 0) -> ObjectRun:
    names = [bytes([seed]) * 31 + bytes([i]) for i in range(n)]
    return ObjectRun(names[0], names, bytes(32), start, tenant, conversation, [memoryview(h * 2) for h in names])


@settings(max_examples=50)
@given(st.integers(1, 64), st.text(max_size=64), st.text(max_size=256), st.integers(0, MAX_DEPTH - 64), hashes, hashes)
def test_an_object_says_what_was_put_into_it(n, tenant, conversation, start, key, parent):
    made = run_of(n, tenant, conversation, start)
    run = ObjectRun(key, made.hashes, parent, start, tenant, conversation, made.payloads)
    name, raw = encode(run, KIND)
    assert name == f"v1/{'ab' * 8}/{key.hex()[:2]}/{key.hex()}.{made.hashes[-1].hex()}"
    assert KIND.is_name(name)
    header = parse_header(name, memoryview(raw), KIND)
    assert (header.name, header.key, header.parent, header.start) == (name, key, parent, start)
    assert (header.tenant, header.conversation, list(header.hashes)) == (tenant, conversation, made.hashes)
    into = [memoryview(bytearray(64)) for _ in range(n)]
    assert take_blocks(header, memoryview(raw)[HEADER_BYTES:], 0, into, KIND) == [None] * n
    assert into == list(made.payloads)


@given(st.data())
def test_any_bit_of_an_object_counts(data):
    name, raw = encode(run_of(5, "tenant", "conversation"), KIND)
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    into = [memoryview(bytearray(64)) for _ in range(5)]
    if bit // 8 < HEADER_BYTES:
        with pytest.raises(NotServed):
            parse_header(name, memoryview(raw), KIND)
    else:
        header = parse_header(name, memoryview(raw), KIND)
        wrong = take_blocks(header, memoryview(raw)[HEADER_BYTES:], 0, into, KIND)
        hit = (bit // 8 - HEADER_BYTES) // 64
        assert [i for i, reason in enumerate(wrong) if reason is not None] == [hit]
        assert into[hit] == bytes(64), "what is wrong is not handed on"


def test_an_object_of_another_layout_or_under_another_name_is_refused():
    name, raw = encode(run_of(2), KIND)
    for other, says in ((Kind("cd" * 32, 64), "layout abab"), (Kind("ab" * 32, 128), "layout abab")):
        with pytest.raises(NotServed, match=says):
            parse_header(name, memoryview(raw), other)
    elsewhere, _ = encode(run_of(2, seed=1), KIND)
    with pytest.raises(NotServed, match="it is the object v1/"):
        parse_header(elsewhere, memoryview(raw), KIND)
    with pytest.raises(NotServed, match="100 bytes"):
        parse_header(name, memoryview(raw)[:100], KIND)
    with pytest.raises(NotServed, match="another kind or version"):
        parse_header(name, memoryview(raw[:8] + b"\x02" + raw[9:]), KIND)


def test_what_can_not_be_an_object_is_refused():
    good = run_of(3)
    parts = (good.key, good.hashes, good.parent, 0, "", "", good.payloads)
    for i, wrong, says in (
        (0, b"k", "segment's key of 1 bytes"),
        (1, [b"h", *good.hashes[1:]], "hash of 1 bytes"),
        (1, [], "0 hashes and 3 blocks"),
        (2, b"p", "parent's hash of 1 bytes"),
        (4, "t" * 257, "tenant of 257 bytes"),
        (5, "ß" * 600, "conversation of 1200 bytes"),
        (6, good.payloads[:2], "3 hashes and 2 blocks"),
        (6, [*good.payloads[:2], memoryview(b"x")], "block of 1 bytes"),
    ):
        with pytest.raises(KVError, match=says):
            encode(ObjectRun(*(wrong if i == j else part for j, part in enumerate(parts))), KIND)
    with pytest.raises(KVError, match="65 hashes"):
        encode(run_of(65), KIND)


@pytest.mark.parametrize(
    "name",
    ["", "v1/", f"v1/{'ab' * 8}/00/x.y", f"v2/{'ab' * 8}/00/{'00' * 32}.{'00' * 32}", f"v1/{'ab' * 8}/0/{'00' * 32}"],
)
def test_names_of_other_things_are_none(name):
    assert not KIND.is_name(name)
