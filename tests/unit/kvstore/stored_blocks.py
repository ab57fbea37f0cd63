"""Blocks whose bytes follow from their hash, so that whoever reads one knows what it must be."""

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distserve.errors import DistServeError
from distserve.kv.hashing import unpack
from distserve.kv.layout import block_bytes
from distserve.messages import KVLayout
from distserve_kvstore.disk import DiskOptions, DiskTier, Record, RecoveredRun

ALIGNED = KVLayout(weights="a", dtype="bfloat16", num_layers=2, num_kv_heads=1, head_dim=64, block_size=16, rope="")
ODD = KVLayout(weights="o", dtype="bfloat16", num_layers=3, num_kv_heads=1, head_dim=8, block_size=16, rope="")
OTHER = KVLayout(weights="x", dtype="bfloat16", num_layers=2, num_kv_heads=1, head_dim=64, block_size=16, rope="")
assert (block_bytes(ALIGNED), block_bytes(ODD)) == (8192, 1536)

SEGMENT_BYTES = 256 << 10
OPTIONS = DiskOptions(capacity_bytes=8 << 20, segment_bytes=SEGMENT_BYTES, min_free_fraction=0.0, node="kv-a")


def content(hash_: bytes, num_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of the block of this name. uint8 [num_bytes]."""
    seed = [int.from_bytes(hash_[i : i + 4], "little") for i in range(0, 16, 4)]
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def chain(name: str, n: int) -> list[bytes]:
    """Hashes of n blocks, each made from the one before; chains of different names share none."""
    hashes = [hashlib.sha256(name.encode()).digest()]
    while len(hashes) < n:
        hashes.append(hashlib.sha256(hashes[-1]).digest())
    return hashes


def records(
    hashes: Sequence[bytes], layout: KVLayout, tenant: str = "t", conversation: str = "c", start: int = 0
) -> list[Record]:
    """Blocks of a chain from depth `start` on; hashes[0] has a parent of zeros."""
    payloads = rows(len(hashes), layout)
    for row, h in zip(payloads, hashes, strict=True):
        row[:] = content(h, len(row))
    return [
        Record(h, hashes[i - 1] if i else bytes(32), start + i, tenant, conversation, payloads[i])
        for i, h in enumerate(hashes)
    ]


def rows(n: int, layout: KVLayout) -> npt.NDArray[np.uint8]:
    """As an arena has them: aligned where a block is. uint8 [n, block_bytes]."""
    size = block_bytes(layout)
    return np.frombuffer(mmap.mmap(-1, max(1, n * size)), np.uint8)[: n * size].reshape(n, size)


def served(
    tier: DiskTier, places: Sequence[int], hashes: Sequence[bytes], layout: KVLayout
) -> list[DistServeError | None]:
    """What read() says of each; what it serves is what it must be."""
    into = rows(len(places), layout)
    errors = tier.read(places, hashes, [row.data for row in into])
    for h, row, error in zip(hashes, into, errors, strict=True):
        assert error is not None or (row == content(h, len(row))).all(), "wrong bytes were served"
    return errors


def found(runs: Sequence[RecoveredRun]) -> dict[bytes, int]:
    """Hash -> place of all that was recovered; no hash comes twice."""
    pairs = [pair for run in runs for pair in zip(unpack(run.hashes), run.places, strict=True)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@contextmanager
def opened(
    folder: Path, layout: KVLayout = ALIGNED, options: DiskOptions = OPTIONS
) -> Iterator[tuple[DiskTier, dict[bytes, int]]]:
    """The tier and what it found, hash -> place. Its books are right when it closes."""
    tier, runs = DiskTier.open(folder, layout, options)
    try:
        yield tier, found(runs)
        tier.check()
    finally:
        tier.close()
