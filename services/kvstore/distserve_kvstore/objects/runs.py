"""What goes into the object tier and comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_RUN_BLOCKS = 64  # one object; a segment of a chain (kv/placement.py)


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    timeout_s: float = 10.0  # for the answer to one call, and at most as much before it for its turn
    max_concurrent: int = 8  # calls under way; more wait for their turn
    backoff_s: tuple[float, float] = (1.0, 30.0)  # after a failure: the first pause, doubled each time, the longest


@dataclass(frozen=True, slots=True)
class ObjectRun:
    """Up to MAX_RUN_BLOCKS blocks that follow one another in a chain, to be kept as one object.

    payloads: of each block uint8 [block_bytes]; they must not change until put() has returned, or raised.
    """

    key: bytes  # the hash of the first block of the segment that they are in
    hashes: Sequence[bytes]
    parent: bytes
    start: int  # depth of the first
    tenant: str
    conversation: str
    payloads: Sequence[memoryview | npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """What an object says of itself."""

    name: str
    key: bytes
    hashes: tuple[bytes, ...]
    parent: bytes
    start: int
    tenant: str
    conversation: str
    sums: tuple[int, ...]  # xxh3 of each block

    @property
    def num_blocks(self) -> int:
        return len(self.hashes)
