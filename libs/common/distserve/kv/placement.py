"""Which store node is to hold which blocks: rendezvous hashing of segments. Pure arithmetic, the same on every side.

    chain      0 … 63 | 64 … 127 | 128 … 191 | 192 …
    segment       0        1           2         3        key: the hash of the segment's first block

Neighbours live together, a long chain is spread, and chains that share their beginning share its place. Each node has a
weight for each key, a hash of the two; the owner is the node with the highest, replicas go to those next in order
(highest random weight: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM Transactions
on Networking 6(1), 1998). A node that joins takes over what it now comes first for, and nothing else moves; one that
leaves gives only its own away, each segment to the next in its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

SEGMENT_BLOCKS = 64

_DOMAIN = b"kv placement 1"  # at most 16 bytes: blake2b's personalisation


def segments(first: int, stop: int) -> Iterator[range]:
    """Depths [first, stop) of a chain, cut at the segments' borders."""
    while first < stop:
        end = min(stop, first - first % SEGMENT_BLOCKS + SEGMENT_BLOCKS)
        yield range(first, end)
        first = end


def segment_key(hashes: Sequence[bytes], depth: int) -> bytes:
    """The key of the segment that block `depth` of a chain is in. hashes: the chain's, from depth 0 on."""
    return hashes[depth - depth % SEGMENT_BLOCKS]


def owners(key: bytes, nodes: Iterable[str], n: int = 1) -> list[str]:
    """The first n of the nodes in the segment's order: its owner, then those that hold copies or take its place."""
    return sorted(nodes, key=lambda node: (-_weight(key, node), node))[:n]


def _weight(key: bytes, node: str) -> int:
    """64 bits, as good as random, the same everywhere."""
    digest = blake2b(key, digest_size=8, person=_DOMAIN)
    digest.update(node.encode())
    return int.from_bytes(digest.digest(), "little")
