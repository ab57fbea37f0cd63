import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.errors import KVError
from distserve.kv.hashing import block_hash, block_hashes, root_hash

tokens = st.lists(st.integers(0, 2**40), max_size=40)


def test_a_hash_is_sha256_of_parent_and_tokens():
    parent = root_hash("layout")
    expected = hashlib.sha256(parent + struct.pack("<3Q", 5, 6, 2**33)).digest()
    assert block_hash(parent, [5, 6, 2**33]) == expected
    assert block_hashes([5, 6, 2**33, 9], 3, "layout") == [expected]


@given(tokens, tokens, st.integers(1, 7))
def test_equal_hashes_are_equal_prefixes(a, b, block_size):
    ours, theirs = block_hashes(a, block_size, "f"), block_hashes(b, block_size, "f")
    assert len(ours) == len(a) // block_size
    for i in range(min(len(ours), len(theirs))):
        stop = (i + 1) * block_size
        assert (ours[i] == theirs[i]) == (a[:stop] == b[:stop])


def test_the_fingerprint_and_the_salt_are_in_every_hash():
    variants = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("ab", "d")]
    hashes = [tuple(block_hashes(list(range(8)), 4, *variant)) for variant in variants]
    assert len({h for pair in hashes for h in pair}) == 2 * len(variants)


def test_what_is_no_hash_or_size_is_refused():
    with pytest.raises(KVError, match="32 bytes"):
        block_hash(b"short", [1])
    with pytest.raises(KVError, match="block_size is 0"):
        block_hashes([1], 0, "f")
