"""Names of full blocks by content: equal hash means interchangeable KV (not equal bits: those depend on batch and
kernel). A hash chains its parent's, so it stands for the whole prefix up to the block's end."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from distserve.errors import KVError

_DOMAIN = b"distserve kv block 1"


def root_hash(fingerprint: str, salt: str = "") -> bytes:
    """The parent of every first block: binds the chain to a layout's fingerprint and to a tenant's salt. 32 bytes."""
    digest = hashlib.sha256(_DOMAIN)
    for text in (fingerprint, salt):
        raw = text.encode()
        # A length before each text: ("ab", "c") and ("a", "bc") must differ.
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """sha256 of the parent's hash and the block's token ids as little-endian uint64. 32 bytes."""
    if len(parent) != 32:
        raise KVError(f"a parent hash has 32 bytes, this one {len(parent)}", size_bytes=len(parent), expected=32)
    words = array("Q", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return hashlib.sha256(parent + words.tobytes()).digest()


def block_hashes(token_ids: Sequence[int], block_size: int, fingerprint: str, salt: str = "") -> list[bytes]:
    """The hashes of all full blocks of `token_ids`, in order; a last partial block has none."""
    if block_size < 1:
        raise KVError(f"block_size is {block_size}, must be at least 1", block_size=block_size, expected=">=1")
    parent, hashes = root_hash(fingerprint, salt), []
    for stop in range(block_size, len(token_ids) + 1, block_size):
        parent = block_hash(parent, token_ids[stop - block_size : stop])
        hashes.append(parent)
    return hashes
