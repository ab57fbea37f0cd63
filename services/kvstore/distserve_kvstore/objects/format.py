"""Bytes and names of objects, version 1: pure, apart from I/O. All numbers are little-endian.

    header    4096               magic, version, layout's fingerprint, block_bytes, how many, depth of the first,
                                 parent, segment's key, tenant, conversation, hashes, an xxh3 of each block, and
                                 one of itself
    blocks    n * block_bytes

One object is a run of up to MAX_RUN_BLOCKS blocks of one segment of a chain. Its name says which layout, segment and
last block: v1/<fingerprint, 16 hex>/<key, first 2 hex>/<key>.<last block's hash>.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from distserve.errors import KVError
from distserve.kv.hashing import HASH_BYTES, pack, unpack
from distserve.messages.store import MAX_DEPTH
from distserve_kvstore.disk.format import MAX_CONVERSATION_BYTES, MAX_TENANT_BYTES, check_names
from distserve_kvstore.objects.runs import MAX_RUN_BLOCKS, ObjectHeader, ObjectRun

VERSION = 1
HEADER_BYTES = 4096

_MAGIC = b"DSKVOBJT"
_FIXED = struct.Struct("<8sI32sQIQ32s32sHH")
_SUM = struct.Struct("<Q")


class NotServed(Exception):
    """An object that is foreign or damaged, and why."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What all objects of one layout have in common."""

    fingerprint: str  # hex
    block_bytes: int

    @property
    def prefix(self) -> str:
        """Of their names."""
        return f"v{VERSION}/{self.fingerprint[:16]}/"

    def name(self, key: bytes, last_hash: bytes) -> str:
        return f"{self.prefix}{key.hex()[:2]}/{key.hex()}.{last_hash.hex()}"

    def offset(self, block: int) -> int:
        """Where a block begins."""
        return HEADER_BYTES + block * self.block_bytes

    def is_name(self, name: str) -> bool:
        """Whether it is one that name() makes."""
        shard, _, rest = name.removeprefix(self.prefix).partition("/")
        key, _, last = rest.partition(".")
        if not name.startswith(self.prefix) or len(shard) != 2 or not key.startswith(shard):
            return False
        return all(len(h) == 2 * HASH_BYTES and set(h) <= set("0123456789abcdef") for h in (key, last))


def encode(run: ObjectRun, kind: Kind) -> tuple[str, bytearray]:
    """Name and bytes of an object. Raises KVError for a run that can't be one."""
    payloads = [(p.data if isinstance(p, np.ndarray) else p).cast("B") for p in run.payloads]
    n = len(run.hashes)
    if not 1 <= n <= MAX_RUN_BLOCKS or len(payloads) != n:
        raise KVError(f"{n} hashes and {len(payloads)} blocks, an object has 1 to {MAX_RUN_BLOCKS} of each")
    for what, value, length in (
        ("segment's key", run.key, HASH_BYTES),
        ("parent's hash", run.parent, HASH_BYTES),
        *(("hash", h, HASH_BYTES) for h in run.hashes),
        *(("block", p, kind.block_bytes) for p in payloads),
    ):
        if len(value) != length:
            raise KVError(f"a {what} of {len(value)} bytes, must be {length}", size_bytes=len(value), expected=length)
    check_names(run.tenant, run.conversation)
    tenant, conversation = run.tenant.encode(), run.conversation.encode()
    raw = bytearray(HEADER_BYTES + n * kind.block_bytes)
    _FIXED.pack_into(
        raw,
        0,
        _MAGIC,
        VERSION,
        bytes.fromhex(kind.fingerprint),
        kind.block_bytes,
        n,
        run.start,
        run.parent,
        run.key,
        len(tenant),
        len(conversation),
    )
    sums = struct.pack(f"<{n}Q", *(xxh3_64_intdigest(p) for p in payloads))
    rest = tenant + conversation + pack(run.hashes) + sums
    raw[_FIXED.size : _FIXED.size + len(rest)] = rest
    _SUM.pack_into(raw, HEADER_BYTES - _SUM.size, xxh3_64_intdigest(memoryview(raw)[: HEADER_BYTES - _SUM.size]))
    for i, payload in enumerate(payloads):
        raw[kind.offset(i) : kind.offset(i + 1)] = payload
    return kind.name(run.key, run.hashes[-1]), raw


def parse_header(name: str, raw: memoryview, kind: Kind) -> ObjectHeader:
    """raw: an object's first bytes. Raises NotServed."""
    if len(raw) < HEADER_BYTES:
        raise NotServed(f"it has {len(raw)} bytes, less than a header")
    magic, version, digest, block_bytes, n, start, parent, key, tenant, conversation = _FIXED.unpack_from(raw)
    if magic != _MAGIC or version != VERSION:
        raise NotServed(f"it is of another kind or version ({bytes(magic)!r}, {version})")
    (found,) = _SUM.unpack_from(raw, HEADER_BYTES - _SUM.size)
    if found != xxh3_64_intdigest(raw[: HEADER_BYTES - _SUM.size]):
        raise NotServed("its header's checksum is wrong")
    if digest.hex() != kind.fingerprint or block_bytes != kind.block_bytes:
        raise NotServed(f"it holds blocks of layout {digest.hex()[:16]}, not {kind.fingerprint[:16]}")
    if not 1 <= n <= MAX_RUN_BLOCKS or start + n > MAX_DEPTH:
        raise NotServed(f"it says that it has {n} blocks from depth {start} on, of at most {MAX_RUN_BLOCKS}")
    if tenant > MAX_TENANT_BYTES or conversation > MAX_CONVERSATION_BYTES:
        raise NotServed(f"its tenant's and its conversation's name have {tenant} and {conversation} bytes")
    at, parts = _FIXED.size, []
    for length in (tenant, conversation, n * HASH_BYTES, n * 8):
        parts.append(bytes(raw[at : at + length]))
        at += length
    hashes = unpack(parts[2])
    if name != kind.name(key, hashes[-1]):
        raise NotServed(f"it is the object {kind.name(key, hashes[-1])}")
    try:
        names = [part.decode() for part in parts[:2]]
    except UnicodeDecodeError as e:
        raise NotServed(f"a name in it is no text: {e}") from e
    sums = struct.unpack(f"<{n}Q", parts[3])
    return ObjectHeader(name, key, tuple(hashes), parent, start, names[0], names[1], sums)


def take_blocks(
    header: ObjectHeader, raw: memoryview, first: int, into: Sequence[memoryview], kind: Kind
) -> list[str | None]:
    """Blocks from `first` on, whose bytes begin raw, each into its buffer; None where its checksum is right, else what
    is wrong."""
    size = kind.block_bytes
    found: list[str | None] = []
    for i, buffer in enumerate(into):
        block = raw[i * size : (i + 1) * size]
        if len(block) < size:
            found.append("the object ends before it")
        elif xxh3_64_intdigest(block) != header.sums[first + i]:
            found.append("its checksum is wrong")
        else:
            buffer[:] = block
            found.append(None)
    return found
