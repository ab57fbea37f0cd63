"""Requests for room that found none, in the order in which they are granted.

By class, then as they came; but one that so many were granted before that had come after it goes first, so that nobody
waits for ever. Pure: who is at the head is all that it says.
"""

from collections.abc import Iterator

from distserve.messages import LeaseRequest
from distserve.worker.due import RANKS
from distserve_decode.reservation import Waiter

# Grants to others that had come after it, at most.
MAX_OVERTAKEN = 16


class LeaseQueue:
    def __init__(self, *, by_class: bool) -> None:
        """by_class: else first come, first served."""
        self._by_class = by_class
        self._waiters: list[Waiter] = []  # as they came

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiters)

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._waiters

    def rank(self, request: LeaseRequest) -> int:
        return RANKS[request.slo.priority] if self._by_class else 0

    @property
    def head(self) -> Waiter | None:
        if not self._waiters:
            return None
        # Whoever has overtaken another has overtaken the oldest as often, or was not there.
        if self._waiters[0].num_overtaken >= MAX_OVERTAKEN:
            return self._waiters[0]
        return min(self._waiters, key=lambda w: self.rank(w.request))

    def add(self, waiter: Waiter) -> None:
        self._waiters.append(waiter)

    def remove(self, waiter: Waiter) -> None:
        """It waits no more, and has got nothing."""
        self._waiters.remove(waiter)

    def granted(self, waiter: Waiter) -> None:
        """It has its lease."""
        for earlier in self._waiters[: self._waiters.index(waiter)]:
            earlier.num_overtaken += 1
        self._waiters.remove(waiter)
