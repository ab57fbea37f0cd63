"""What decides which blocks leave a tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from distserve.errors import KVError
from distserve.messages.store import Tier
from distserve_kvstore.columns import BATCH, Columns, Entries
from distserve_kvstore.eviction.order import NOWHERE, Order

LEAVING = 1  # named as victims, not removed yet
BATCHES = LEAVING + 1  # blocks of low priority: they go before all others
FIRST_OWN = BATCHES + 1  # the first queue of the policy's own


class TierBook:
    """What a policy knows of one tier."""

    def __init__(self, columns: Columns, tier: Tier, capacity: int, vip_limit: int, num_queues: int) -> None:
        self._columns = columns
        self.tier = tier
        self.capacity = capacity
        self.vip_limit = vip_limit
        self.num_kept = 0
        self.order = Order(num_queues + FIRST_OWN - 1, columns.capacity)
        self.num_children: Entries = np.zeros(columns.capacity, np.int32)  # in this tier
        self.kept: NDArray[np.bool_] = np.zeros(columns.capacity, np.bool_)  # VIP, within the quota

    def reserve(self) -> None:
        """As many elements as the index has."""
        if (capacity := self._columns.capacity) > len(self.kept):
            self.order.reserve(capacity)
            self.num_children = np.concatenate((self.num_children, np.zeros(capacity - len(self.kept), np.int32)))
            self.kept = np.concatenate((self.kept, np.zeros(capacity - len(self.kept), np.bool_)))

    def has(self, entries: Entries) -> NDArray[np.bool_]:
        here: NDArray[np.bool_] = self.order.queues(entries) != NOWHERE
        return here

    def count_children(self, entries: Entries, step: int) -> None:
        parents = self._columns.parent[entries]
        np.add.at(self.num_children, parents[parents >= 0], step)

    def keep(self, entries: Entries) -> None:
        """Those of them that a pinned conversation runs through, as many as the quota allows, from the first on."""
        vips = entries[(self._columns.num_vips[entries] > 0) & ~self.kept[entries]]
        vips = vips[: max(0, self.vip_limit - self.num_kept)]
        self.kept[vips] = True
        self.num_kept += len(vips)

    def let_go(self, entries: Entries) -> None:
        self.num_kept -= int(np.count_nonzero(self.kept[entries]))
        self.kept[entries] = False


class Policy(ABC):
    """One for all tiers of a node; make_policy() makes it. Told of what happens in chain order, the first block first,
    after the columns have been written; asked for victims.

    A victim has no pins and, within its tier, no child: a chain is cut from its end. Pinned conversations' blocks are
    no victims while there are at most vip_quota of the tier's capacity of them; beyond that they compete as others.
    Blocks of low priority go first. Nothing here looks at all blocks: what is called costs O(1) a block, over time.
    """

    num_queues: int  # of its own, for each tier

    def __init__(self, columns: Columns, capacities: Mapping[Tier, int], vip_quota: float = 0.0) -> None:
        """capacities: blocks that a tier holds after an eviction (its low watermark). Watches the index from now on."""
        self._columns = columns
        self._books = {
            tier: TierBook(columns, tier, capacity, int(vip_quota * capacity), self.num_queues)
            for tier, capacity in capacities.items()
        }
        columns.watcher = self

    @property
    def num_bytes(self) -> int:
        return sum(b.order.num_bytes + b.num_children.nbytes + b.kept.nbytes for b in self._books.values())

    def num_kept(self, tier: Tier) -> int:
        """Blocks there that can't be evicted since pinned conversations run through them."""
        return self._books[tier].num_kept

    def added(self, entries: Entries, tier: Tier) -> None:
        """They are in the tier now; those that it had already are not touched. Of a tier without a policy: ignored."""
        if tier not in self._books:
            return
        for book in self._books.values():
            book.reserve()
        book = self._books[tier]
        entries = _distinct(entries)
        entries = entries[~book.has(entries)]
        known = np.zeros(len(entries), np.bool_)
        for other in self._books.values():
            known |= other.has(entries)
        self._counted(entries[~known])
        book.count_children(entries, 1)
        book.keep(entries)
        self._came(book, entries)

    def used(self, entries: Entries) -> None:
        """In whatever tiers they are."""
        entries = _distinct(entries)
        self._counted(entries)
        for book in self._books.values():
            book.reserve()
            here = entries[book.has(entries)]
            book.keep(here)
            self._used(book, here)

    def removed(self, entries: Entries, tier: Tier | None = None) -> None:
        """They have left the tier, or all of them. Before the index forgets them."""
        entries = _distinct(entries)
        for book in self._books.values() if tier is None else filter(None, [self._books.get(tier)]):
            book.reserve()
            gone = entries[book.has(entries)]
            book.order.discard(gone)
            book.let_go(gone)
            book.count_children(gone, -1)
            self._return(book, self._columns.parent[gone])

    @abstractmethod
    def victims(self, n: int, tier: Tier) -> Entries:
        """Up to n blocks to take out of the tier, children before parents: take them out in this order, and none whose
        child stays. Asked again it names the same; pin those whose removal takes a while, and tell removed()."""

    def linked(self, children: Entries) -> None:
        """They have a parent now that came after them (Watcher)."""
        for book in self._books.values():
            book.reserve()
            book.count_children(children[book.has(children)], 1)

    def released(self, entries: Entries) -> None:
        """They have lost their last pin or their last pinned conversation (Watcher)."""
        for book in self._books.values():
            book.reserve()
            book.let_go(entries[self._columns.num_vips[entries] == 0])
            self._return(book, entries)

    def cherished(self, entries: Entries) -> None:
        """A pinned conversation runs through them (Watcher)."""
        for book in self._books.values():
            book.reserve()
            book.keep(entries[book.has(entries)])

    def check(self) -> None:
        """Raises KVError if what is known of a tier contradicts the index. Looks at everything."""
        columns: dict[Tier, NDArray[np.signedinteger]] = {
            "dram": self._columns.dram,
            "disk": self._columns.disk,
            "object": self._columns.object,
        }
        for tier, book in self._books.items():
            book.reserve()
            book.order.check()
            entries = self._columns.entries()
            here = book.has(entries)
            counts = np.zeros(self._columns.capacity, np.int32)
            parents = self._columns.parent[entries[here]]
            np.add.at(counts, parents[parents >= 0], 1)
            if (here != (columns[tier][entries] >= 0)).any() or book.order.num_elsewhere(entries):
                wrong = "has other blocks than its column says"
            elif (counts[entries] != book.num_children[entries]).any():
                wrong = "has other children than counted"
            elif book.num_kept != np.count_nonzero(book.kept) or book.kept[entries[~here]].any():
                wrong = "keeps other VIP blocks than counted"
            elif book.num_kept > book.vip_limit or (self._columns.num_vips[np.flatnonzero(book.kept)] == 0).any():
                wrong = "keeps more VIP blocks than it may, or others"
            else:
                continue
            raise KVError(f"the policy's book of tier {tier} {wrong}", tier=tier)

    @abstractmethod
    def _came(self, book: TierBook, entries: Entries) -> None:
        """Put them into queues."""

    @abstractmethod
    def _used(self, book: TierBook, entries: Entries) -> None:
        """Put them into queues again; all are in the tier."""

    @abstractmethod
    def _counted(self, entries: Entries) -> None:
        """They were asked for once more, whatever tiers they are in."""

    def _apart(self, book: TierBook, entries: Entries) -> Entries:
        """Blocks of low priority go to their queue; returns the others, children first."""
        entries = entries[::-1]
        batches = self._columns.priority[entries] == BATCH
        book.order.append(entries[batches], BATCHES)
        others: Entries = entries[~batches]
        return others

    def _return(self, book: TierBook, entries: Entries) -> None:
        """Those that were parked and can be evicted now are the oldest of their queues."""
        parked = np.unique(entries[entries >= 0])
        parked = parked[book.order.is_parked(parked)]
        free = (book.num_children[parked] == 0) & (self._columns.num_pins[parked] == 0) & ~book.kept[parked]
        book.order.unpark(parked[free])


class Cut:
    """A choice of victims under way: a child that has been chosen holds its parent no more. Those that were chosen
    before and are still there come first, so that a choice is made once."""

    def __init__(self, columns: Columns, book: TierBook) -> None:
        self._columns = columns
        self._book = book
        self._num_leaving: dict[int, int] = {}  # children of the key
        self.chosen: list[int] = []

    def first_of(self, *queues: int) -> int:
        """The oldest of the first of these queues that has one that can be evicted now; -1: none has. Older ones, which
        can't be, are parked."""
        order = self._book.order
        for queue in queues:
            while (entry := order.oldest(queue)) >= 0:
                if self._is_free(entry):
                    return entry
                order.park_one(entry)
        return -1

    def choose(self, entry: int) -> None:
        order = self._book.order
        order.park_one(entry)
        self.chosen.append(entry)
        parent = int(self._columns.parent[entry])
        if parent >= 0:
            self._num_leaving[parent] = self._num_leaving.get(parent, 0) + 1
            if self._is_free(parent):
                order.unpark_one(parent)

    def done(self) -> Entries:
        """The victims."""
        chosen = np.array(self.chosen, np.int32)
        self._book.order.prepend(chosen, LEAVING)
        return chosen

    def _is_free(self, entry: int) -> bool:
        book = self._book
        if book.num_children[entry] != self._num_leaving.get(entry, 0) or self._columns.num_pins[entry]:
            return False
        if self._columns.num_vips[entry]:  # it may have come when the quota was used up, which it is no more
            book.keep(np.array([entry], np.int32))
        return not book.kept[entry]


def _distinct(entries: Entries) -> Entries:
    """In the same order, each once."""
    if len(np.unique(entries)) == len(entries):
        return entries
    return np.array(list(dict.fromkeys(entries.tolist())), np.int32)
