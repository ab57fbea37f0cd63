"""Least recently used."""

from __future__ import annotations

from distserve.messages.store import Tier
from distserve_kvstore.columns import Entries
from distserve_kvstore.eviction.base import BATCHES, FIRST_OWN, LEAVING, Cut, Policy, TierBook


class LRU(Policy):
    """One queue, by last use; of blocks that are used together the deepest is the oldest."""

    num_queues = 1

    def victims(self, n: int, tier: Tier) -> Entries:
        book = self._books[tier]
        book.reserve()
        cut = Cut(self._columns, book)
        while len(cut.chosen) < n:
            entry = cut.first_of(LEAVING, BATCHES, FIRST_OWN)
            if entry < 0:
                break
            cut.choose(entry)
        return cut.done()

    def _counted(self, entries: Entries) -> None:
        """Once is as good as often."""

    def _came(self, book: TierBook, entries: Entries) -> None:
        book.order.append(self._apart(book, entries), FIRST_OWN)

    def _used(self, book: TierBook, entries: Entries) -> None:
        book.order.append(self._apart(book, entries), FIRST_OWN)
