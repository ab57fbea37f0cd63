"""Chains of blocks for the tests of the index: every block is a path from the root, its name a hash of it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

Path = tuple[int, ...]  # a block: the choices that lead to it; its parent is the path without the last

ROOT = sha256(b"root").digest()
ALIKE = b"the same"  # 8 bytes


def name(path: Path) -> bytes:
    """Of blocks whose last choice is odd the first 8 bytes are the same: they all want one slot of a hash table."""
    if not path:
        return ROOT
    digest = sha256(repr(path).encode()).digest()
    return ALIKE + digest[8:] if path[-1] % 2 else digest


def names(paths: Sequence[Path]) -> bytes:
    return b"".join(map(name, paths))


def run(tip: Path, start: int = 0) -> list[Path]:
    """The blocks from depth `start` down to `tip`."""
    return [tip[: depth + 1] for depth in range(start, len(tip))]
