"""What a lookup has found: which blocks, where, under which pins."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from distserve.bus import subjects
from distserve.kv.hashing import HASH_BYTES
from distserve.messages import TIERS, Tier


@dataclass(frozen=True, slots=True)
class Source:
    """A store node, or a worker whose pool is asked."""

    role: Literal["kvstore", "decode"]
    worker_id: str

    @property
    def subject(self) -> str:
        return subjects.worker(self.role, self.worker_id)


@dataclass(slots=True, eq=False)
class Pin:
    """All that one answer found is pinned under one id, which is given back once."""

    source: Source
    pin_id: int  # 0: nothing is pinned
    held: bool = True

    def taken(self) -> bool:
        """It is the caller's to give back, if True."""
        held, self.held = self.held and self.pin_id != 0, False
        return held


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks that follow one another in a chain and are had from one source."""

    start: int  # depth of the first
    hashes: bytes  # packed
    tiers: bytes  # of each block, its place in TIERS
    pin: Pin

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def beginning(self, num_blocks: int) -> Piece:
        return Piece(self.start, self.hashes[: num_blocks * HASH_BYTES], self.tiers[:num_blocks], self.pin)


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks [first, first + len(self)) of a chain. fetch() or release() it: its pins keep them where they are."""

    first: int
    pieces: tuple[Piece, ...] = ()  # in order, without a gap
    pins: tuple[Pin, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def tiers(self) -> Counter[Tier]:
        """Blocks of each tier."""
        return Counter(TIERS[place] for piece in self.pieces for place in piece.tiers)

    def beginning(self, num_blocks: int) -> Found:
        """Its first num_blocks blocks, under the same pins: fetch or release one of the two."""
        pieces: list[Piece] = []
        for piece in self.pieces:
            if num_blocks <= 0:
                break
            pieces.append(piece if len(piece) <= num_blocks else piece.beginning(num_blocks))
            num_blocks -= len(piece)
        return Found(self.first, tuple(pieces), self.pins)
