"""Several sources' answers, put together to the longest unbroken run of blocks. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distserve.kv.hashing import HASH_BYTES
from distserve.messages import TIERS
from distserve.worker.store.found import Piece, Pin

_MEMORY = TIERS.index("dram")  # tiers up to this one


@dataclass(frozen=True, slots=True)
class Segment:
    """What one place in the chain was asked for. hashes: packed."""

    start: int
    hashes: bytes

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one source about one segment: tiers of the blocks that it has of it, from the first on, unbroken."""

    tiers: bytes
    pin: Pin


@dataclass(slots=True, eq=False)
class Asked:
    """A segment, and what is known of it so far."""

    segment: Segment
    num_waiting: int = 0  # sources that have not answered yet
    answers: list[Answer] = field(default_factory=list)

    def best(self, choice: Callable[[Sequence[Answer]], Answer] = random.choice) -> Answer | None:
        """The longest; of those the one in the fastest tiers; of equal ones any, so that replicas share the work. None
        if nobody has anything."""
        answers = [a for a in self.answers if a.tiers]
        if not answers:
            return None

        def merit(answer: Answer) -> tuple[int, int]:
            return len(answer.tiers), -sum(answer.tiers)

        top = max(map(merit, answers))
        return choice([a for a in answers if merit(a) == top])

    @property
    def settled(self) -> bool:
        """Waiting longer can't bring what is worth it: all have answered, or one has all of it in memory."""
        whole = len(self.segment)
        return not self.num_waiting or any(
            len(a.tiers) == whole and max(a.tiers, default=0) <= _MEMORY for a in self.answers
        )


def put_together(asked: Sequence[Asked]) -> tuple[Piece, ...]:
    """The longest unbroken run from the first segment's first block on, of what has been answered so far."""
    pieces: list[Piece] = []
    for one in asked:
        best = one.best()
        if best is not None:
            num = len(best.tiers)
            pieces.append(Piece(one.segment.start, one.segment.hashes[: num * HASH_BYTES], best.tiers, best.pin))
        if best is None or len(best.tiers) < len(one.segment):
            break
    return tuple(pieces)


def settled(asked: Sequence[Asked]) -> bool:
    """Whether what put_together() gives is final, or as good as that."""
    for one in asked:
        if not one.settled:
            return False
        best = one.best()
        if best is None or len(best.tiers) < len(one.segment):
            return True
    return True
