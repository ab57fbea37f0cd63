"""What a scheduler that only decides has others do for a sequence that it preempts: its blocks may be kept elsewhere
and brought back."""

from typing import Protocol

from distserve.engine.sequence import Sequence


class Elsewhere(Protocol):
    def give(self, sequence: Sequence, num_now: int) -> None:
        """It is preempted, and loses its blocks when this returns. Whoever goes on reading some of them has a reference
        of its own, but not to the last num_now ones of its table: those are needed at once."""

    def bring(self, sequence: Sequence) -> bool:
        """Its turn has come again. True: what it lacks is being fetched; Scheduler.resume() follows, or remove()."""


class Nowhere:
    """What is gone is computed again."""

    def give(self, sequence: Sequence, num_now: int) -> None: ...

    def bring(self, sequence: Sequence) -> bool:
        return False
