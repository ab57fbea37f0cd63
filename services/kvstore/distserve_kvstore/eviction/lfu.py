"""W-TinyLFU: frequency with ageing decides between what is new and what would have to go for it.

Einziger, Friedman, Manes: TinyLFU: A Highly Efficient Cache Admission Policy, ACM Transactions on Storage 13(4), 2017.
Probation and protected are the segments of a segmented LRU (Karedla, Love, Wherry: Caching Strategies to Improve Disk
System Performance, IEEE Computer 27(3), 1994). How large the window is: window.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from distserve.messages.store import Tier
from distserve_kvstore.columns import Columns, Entries
from distserve_kvstore.eviction.base import BATCHES, FIRST_OWN, LEAVING, Cut, Policy, TierBook
from distserve_kvstore.eviction.miniature import PROTECTED_PART
from distserve_kvstore.eviction.order import Order
from distserve_kvstore.eviction.sketch import FrequencySketch
from distserve_kvstore.eviction.window import Window

WINDOW = FIRST_OWN  # what came last
PROBATION = WINDOW + 1  # what has been admitted, or has not been used for long
PROTECTED = WINDOW + 2  # what was used again since


class WTinyLFU(Policy):
    """New blocks come to the window, a queue by last use. What the window can't hold goes on to probation while the
    tier has room; then it waits, and at the next eviction each such block meets the oldest in probation: the one asked
    for less often lately goes, the new one if they are equal. That is decided late, when places are wanted, since tiers
    are emptied in the background.

    One sketch counts for all tiers, blocks that are gone included.
    """

    num_queues = 3

    def __init__(self, columns: Columns, capacities: Mapping[Tier, int], vip_quota: float = 0.0) -> None:
        super().__init__(columns, capacities, vip_quota)
        self._sketch = FrequencySketch(sum(capacities.values()))
        self._windows = {tier: Window(capacity) for tier, capacity in capacities.items()}

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._sketch.num_bytes

    def added(self, entries: Entries, tier: Tier) -> None:
        super().added(entries, tier)
        if tier in self._books:
            self._admit(self._books[tier], self._windows[tier].num_blocks)

    def victims(self, n: int, tier: Tier) -> Entries:
        book, window = self._books[tier], self._windows[tier].num_blocks
        book.reserve()
        self._admit(book, window)
        cut = Cut(self._columns, book)
        frequencies = Frequencies(self._columns, self._sketch, book.order, n)
        while len(cut.chosen) < n:
            entry = cut.first_of(LEAVING, BATCHES)
            if entry < 0 and self._main_is_over(book):
                entry = cut.first_of(PROBATION, PROTECTED)
            if entry < 0 and book.order.count(WINDOW) > window and (new := cut.first_of(WINDOW)) >= 0:
                entry = self._contest(cut, book, frequencies, new)
            if entry < 0:
                entry = cut.first_of(PROBATION, PROTECTED, WINDOW)
            if entry < 0:
                break
            cut.choose(entry)
        return cut.done()

    def _came(self, book: TierBook, entries: Entries) -> None:
        book.order.append(self._apart(book, entries), WINDOW)

    def _used(self, book: TierBook, entries: Entries) -> None:
        entries = self._apart(book, entries)
        queues = book.order.queues(entries)
        # While probation and protected hold too much, what stays there is the first to go.
        stays = ((queues == PROBATION) | (queues == PROTECTED)) & (not self._main_is_over(book))
        book.order.append(entries[~stays], WINDOW)
        book.order.append(entries[stays], PROTECTED)
        too_many = book.order.count(PROTECTED) - int(PROTECTED_PART * _num_main(book))
        book.order.append(book.order.take_oldest(PROTECTED, too_many), PROBATION)

    def _counted(self, entries: Entries) -> None:
        keys = self._columns.hashes[entries]
        self._sketch.add(keys)
        for window in self._windows.values():
            window.asked(keys[::-1])

    def _admit(self, book: TierBook, window: int) -> None:
        """What the window can't hold goes on, uncontested, while there is room."""
        room = book.capacity - window - _num_main(book)
        too_many = book.order.count(WINDOW) - window
        book.order.append(book.order.take_oldest(WINDOW, min(room, too_many)), PROBATION)

    def _main_is_over(self, book: TierBook) -> bool:
        """More is in probation and protected than the window leaves to them: it has grown."""
        return _num_main(book) > book.capacity - self._windows[book.tier].num_blocks

    def _contest(self, cut: Cut, book: TierBook, frequencies: Frequencies, new: int) -> int:
        """Which of the two goes: the new one or the oldest in probation."""
        old = cut.first_of(PROBATION, PROTECTED)
        if old < 0 or frequencies.of(new) <= frequencies.of(old):
            return new
        book.order.append_one(new, PROBATION)
        return old


class Frequencies:
    """The sketch's estimates, those that will be asked for most likely looked up together."""

    def __init__(self, columns: Columns, sketch: FrequencySketch, order: Order, n: int) -> None:
        self._columns = columns
        self._sketch = sketch
        likely = np.concatenate([order.take_oldest(queue, n) for queue in (WINDOW, PROBATION)])
        self._known: dict[int, int] = dict(zip(likely.tolist(), self._estimate(likely), strict=True))

    def of(self, entry: int) -> int:
        known = self._known.get(entry, -1)
        if known < 0:
            known = self._known[entry] = self._estimate(np.array([entry], np.int32))[0]
        return known

    def _estimate(self, entries: Entries) -> list[int]:
        found: list[int] = self._sketch.estimate(self._columns.hashes[entries]).tolist()
        return found


def _num_main(book: TierBook) -> int:
    return book.order.count(PROBATION) + book.order.count(PROTECTED)
