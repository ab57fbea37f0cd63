"""What goes into the disk tier and comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

MIB = 1 << 20

Buffer: TypeAlias = memoryview | npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """capacity_bytes counts files as they lie there, dead blocks included; 0: what the file system has."""

    capacity_bytes: int = 0
    segment_bytes: int = 256 * MIB  # made smaller where fewer than MIN_SEGMENTS of them fit into the capacity
    direct_io: Literal["auto", "off"] = "auto"
    node: str = ""  # who holds the folder, for the message that a second one gets
    sync_bytes: int = 64 * MIB  # written since the last fdatasync: the next one is due
    min_free_fraction: float = 0.05  # of the file system: left to others
    compact_below: float = 0.5  # sealed segments with a smaller part of live blocks are worth moving


@dataclass(frozen=True, slots=True)
class Record:
    """One block to be kept. payload: uint8 [block_bytes], contiguous; it must not change until append() returns.

    Payloads that begin at a multiple of 4096 and are one long go to the disk without a copy, others are copied once.
    """

    hash: bytes
    parent: bytes  # the hash before; the root's at depth 0
    depth: int
    tenant: str
    conversation: str
    payload: Buffer


@dataclass(frozen=True, slots=True)
class RecoveredRun:
    """Blocks found at opening that follow one another in a chain: what BlockIndex.insert takes, and their places."""

    hashes: bytes  # packed
    parent: bytes
    start: int
    tenant: str
    conversation: str
    places: Sequence[int]


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What one slice of compaction did."""

    num_moved: int  # blocks; their places stay what they were
    freed_bytes: int  # of files that are gone
    more: bool  # something is left that is worth another slice


@dataclass(frozen=True, slots=True)
class DiskStats:
    num_blocks: int  # live
    file_bytes: int  # of segments, as they lie there
    capacity_bytes: int  # of files; what limits, the setting or the file system
    usable_blocks: int  # live blocks that may be held: the rest is compaction's room to move
    num_segments: int
    num_set_aside: int  # files *.damaged and *.foreign
    num_damaged: int  # blocks found damaged since the folder was opened
    direct_io: bool


class Verified(NamedTuple):
    """Blocks that were read to be checked."""

    num_good: int
    num_damaged: int  # not what was written: set aside
    num_unreadable: int  # the disk can't read them now; they may be good
