"""Who has a seat and blocks next: hand-overs that ask for a lease, or sequences that wait here, preempted ones and
prompts of our own.

The higher class goes first; in one class preempted sequences, then hand-overs, then prompts of our own. Whoever waits
here at the head of the scheduler's queue lets so many hand-overs pass, and no more.
"""

from collections.abc import Callable

from distserve.engine.sequence import Sequence
from distserve.messages import LeaseRequest
from distserve.worker.due import RANKS
from distserve_decode.scheduler import Scheduler

# Leases that are granted while a sequence is the first to wait here, whoever is in between.
MAX_PASSED = 16


class Turns:
    """Reservations asks it before each grant, the scheduler before a sequence begins."""

    def __init__(self, scheduler: Scheduler, *, by_class: bool) -> None:
        """by_class: else all are of one."""
        self._scheduler = scheduler
        self._by_class = by_class
        self.first_lease: Callable[[], LeaseRequest | None] = lambda: None  # of those that wait for one

    def may_begin(self, sequence: Sequence) -> bool:
        request = self.first_lease()
        return request is None or self._goes_first(sequence, request)

    def growth(self, request: LeaseRequest) -> int:
        """Blocks that its sequence is expected to take beyond its prompt."""
        return self._scheduler.room.newcomers_growth(request.num_tokens, request.max_new_tokens)

    def spare(self, request: LeaseRequest, growth: int) -> int | None:
        """Blocks that must stay free beside those of its lease, if it is to grow by `growth` more than that holds.
        None: another goes first."""
        waiting = self._scheduler.waiting
        if waiting and self._goes_first(waiting[0], request):
            return None
        return self._scheduler.room.spare(growth) if self._by_class else 0

    def granted(self) -> None:
        """A lease was."""
        if self._scheduler.waiting:
            self._scheduler.standing(self._scheduler.waiting[0]).num_passed += 1

    def _goes_first(self, sequence: Sequence, request: LeaseRequest) -> bool:
        """sequence: the first that waits here."""
        standing = self._scheduler.standing(sequence)
        if standing.num_passed >= MAX_PASSED:
            return True
        ours, theirs = standing.rank, RANKS[request.slo.priority]
        if ours != theirs and self._by_class:
            return ours < theirs
        return sequence.num_preemptions > 0
