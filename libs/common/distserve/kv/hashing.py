"""Names of full blocks by content: equal hash means interchangeable KV (not equal bits: those depend on batch and
kernel). A hash chains its parent's, so it stands for the whole prefix up to the block's end."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from distserve.errors import KVError

_DOMAIN = b"distserve kv block 1"
_TENANT = b"distserve tenant 1\0"

HASH_BYTES = 32


def root_hash(fingerprint: str, salt: str = "") -> bytes:
    """The parent of every first block: binds the chain to a layout's fingerprint and to a tenant's salt. 32 bytes."""
    digest = hashlib.sha256(_DOMAIN)
    for text in (fingerprint, salt):
        raw = text.encode()
        # A length before each text: ("ab", "c") and ("a", "bc") must differ.
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()


def tenant_of(salt: str) -> str:
    """What a store calls those who share a cache salt, which is a secret: 32 hexadecimal digits; "" for no salt."""
    return hashlib.sha256(_TENANT + salt.encode()).hexdigest()[:32] if salt else ""


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
    chain = Chain(block_size, fingerprint, salt)
    chain.extend(token_ids)
    return chain.hashes


def pack(hashes: Sequence[bytes]) -> bytes:
    """Hashes as messages carry them: one after the other, HASH_BYTES each."""
    return b"".join(hashes)


def unpack(packed: bytes) -> list[bytes]:
    """The reverse of pack(). Raises KVError if the length is not a multiple of HASH_BYTES."""
    if len(packed) % HASH_BYTES:
        raise KVError(
            f"packed hashes have {len(packed)} bytes, must be a multiple of {HASH_BYTES}",
            size_bytes=len(packed),
            expected=f"a multiple of {HASH_BYTES}",
        )
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


class Chain:
    """The hashes of a sequence's full blocks, in order, made as its tokens come."""

    __slots__ = ("_block_size", "hashes", "root")

    def __init__(self, block_size: int, fingerprint: str, salt: str = "") -> None:
        if block_size < 1:
            raise KVError(f"block_size is {block_size}, must be at least 1", block_size=block_size, expected=">=1")
        self._block_size = block_size
        self.root = root_hash(fingerprint, salt)
        self.hashes: list[bytes] = []

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def num_tokens(self) -> int:
        """Tokens that the hashes stand for."""
        return len(self.hashes) * self._block_size

    def extend(self, token_ids: Sequence[int]) -> None:
        """`token_ids`: all of the sequence, of which it hashes what makes up further full blocks."""
        parent = self.hashes[-1] if self.hashes else self.root
        for stop in range(self.num_tokens + self._block_size, len(token_ids) + 1, self._block_size):
            parent = block_hash(parent, token_ids[stop - self._block_size : stop])
            self.hashes.append(parent)

    def parent_of(self, depth: int) -> bytes:
        """The hash before block `depth`; the root's before block 0."""
        return self.hashes[depth - 1] if depth else self.root
