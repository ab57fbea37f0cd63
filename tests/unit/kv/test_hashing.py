import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.errors import KVError
from distserve.kv.hashing import HASH_BYTES, Chain, block_hash, block_hashes, pack, root_hash, tenant_of, unpack

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


@given(tokens, st.integers(1, 7), st.data())
def test_a_chain_grown_in_steps_is_the_chain_of_the_whole(all_tokens, block_size, data):
    chain = Chain(block_size, "f", "salt")
    for stop in sorted(data.draw(st.lists(st.integers(0, len(all_tokens)), max_size=5))):
        chain.extend(all_tokens[:stop])
        assert len(chain) == stop // block_size
        assert chain.num_tokens == stop // block_size * block_size
    chain.extend(all_tokens)
    assert chain.hashes == block_hashes(all_tokens, block_size, "f", "salt")


def test_a_chain_says_what_came_before_each_block():
    chain = Chain(4, "f", "salt")
    chain.extend(list(range(12)))
    assert chain.parent_of(0) == chain.root == root_hash("f", "salt")
    assert [chain.parent_of(depth) for depth in (1, 2, 3)] == chain.hashes
    assert block_hash(chain.parent_of(2), [8, 9, 10, 11]) == chain.hashes[2]


def test_an_empty_chain_has_no_blocks_and_needs_a_block_size():
    chain = Chain(4, "f")
    chain.extend([1, 2, 3])
    assert (len(chain), chain.num_tokens, chain.hashes) == (0, 0, [])
    with pytest.raises(KVError, match="block_size is 0"):
        Chain(0, "f")


@given(st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), max_size=5))
def test_hashes_come_out_as_they_were_packed(hashes):
    packed = pack(hashes)
    assert len(packed) == HASH_BYTES * len(hashes)
    assert unpack(packed) == hashes


@pytest.mark.parametrize("size", [1, HASH_BYTES - 1, HASH_BYTES + 1])
def test_packed_hashes_of_another_length_are_refused(size: int):
    with pytest.raises(KVError, match=f"have {size} bytes"):
        unpack(bytes(size))


def test_a_tenant_is_named_by_its_salt_without_giving_it_away():
    assert tenant_of("") == ""
    assert len(tenant_of("secret")) == 32
    assert tenant_of("secret") != tenant_of("secrets")
    assert hashlib.sha256(b"secret").hexdigest()[:32] != tenant_of("secret")
