"""What the node has, and in which tiers: the only place where an entry enters a tier or leaves it.

    entry of the index ──┬── dram:   a row of the arena
                         ├── disk:   a place in the disk tier
                         └── object: a number in the object tier          none of them: it is removed

An entry is *dirty* while it is in memory alone. Belongs to the event loop; nothing here waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from distserve.errors import KVError, Overloaded
from distserve.kv.hashing import HASH_BYTES
from distserve.messages import Tier
from distserve_kvstore.arena import Arena
from distserve_kvstore.columns import NONE, Entries
from distserve_kvstore.doomed import Doomed, Removed
from distserve_kvstore.eviction.base import Policy
from distserve_kvstore.index import BlockIndex
from distserve_kvstore.offers import Owner, Piece
from distserve_kvstore.pins import Pins
from distserve_kvstore.tier_state import TierState

log = logging.getLogger(__name__)

TIERS_HERE: tuple[Tier, ...] = ("dram", "disk", "object")
VIP_S = 3600.0  # for so long a conversation of priority "vip" is pinned by each offer of its blocks
_EVICT_AT_ONCE = 512  # victims asked for in one go, at first
_MOST_ASKED = 2048  # and at last: some 20 ms on the loop; behind so many that stay nothing is looked for


class Holdings:
    def __init__(self, arena: Arena, index: BlockIndex, policy: Policy, states: Mapping[Tier, TierState]) -> None:
        self.arena = arena
        self.index = index
        self.policy = policy
        self.pins = Pins(index, self._unpinned)
        self.doomed = Doomed()
        self.num_blocks: dict[Tier, int] = dict.fromkeys(TIERS_HERE, 0)
        self.num_clean = 0  # in memory and in a lower tier too
        # What the assembly connects; none of it may block.
        self.on_dirty: Callable[[Entries], None] = lambda entries: None
        self.on_added: Callable[[Tier], None] = lambda tier: None
        self.free_places: Callable[[Sequence[int]], None] = lambda places: None  # of the disk tier
        self.may_drop_dirty: Callable[[], bool] = lambda: True  # no lower tier takes a block now
        self._states = states

    # ------------------------------------------------------------ questions

    def is_here(self, hashes: bytes) -> list[bool]:
        """Of each packed hash: in some tier, and not about to go."""
        entries = self.index.find(hashes)
        known = entries >= 0
        known[known] = self.index.in_some_tier(entries[known])
        return [bool(k) and e not in self.doomed for k, e in zip(known, entries.tolist(), strict=True)]

    def prefix(self, hashes: bytes, readable: Sequence[Tier] = TIERS_HERE) -> Entries:
        """The entries of the unbroken beginning of these that is in one of the readable tiers."""
        return self.prefixes([hashes], readable)[0]

    def prefixes(self, runs: Sequence[bytes], readable: Sequence[Tier] = TIERS_HERE) -> list[Entries]:
        """Of each run, as prefix(); all looked up at once."""
        entries = self.index.find(b"".join(runs))
        good = np.zeros(len(entries), np.bool_)
        for tier in readable:
            good |= self.column(tier)[entries] >= 0
        good &= entries >= 0  # -1 has read some other's
        if len(self.doomed):
            good &= ~self.doomed.among(entries)
        found, stop = [], 0
        for run in runs:
            start, stop = stop, stop + len(run) // HASH_BYTES
            part = good[start:stop]
            found.append(entries[start:stop] if part.all() else entries[start : start + int(part.argmin())])
        return found

    def column(self, tier: Tier) -> npt.NDArray[np.signedinteger]:
        """Of the index. Read anew after an insert."""
        if tier not in self.num_blocks:
            raise KVError(f"a store node has no tier {tier!r}", tier=tier)
        column: npt.NDArray[np.signedinteger] = getattr(self.index, tier)
        return column

    def fastest(self, entries: Entries) -> npt.NDArray[np.uint8]:
        """Of each its place in messages.TIERS: 1 dram, 2 disk, 3 object."""
        found = np.where(self.index.disk[entries] >= 0, 2, 3)
        return np.where(self.index.dram[entries] >= 0, 1, found).astype(np.uint8)

    def dirty(self, entries: Entries) -> npt.NDArray[np.bool_]:
        index = self.index
        return (index.dram[entries] >= 0) & (index.disk[entries] < 0) & (index.object[entries] < 0)

    # ------------------------------------------------------------ in

    def adopt(self, piece: Piece, owner: Owner, now: float) -> None:
        """A committed piece of an offer; its rows are ours. Raises, with the rows still the caller's, where the index
        refuses the chain: KVError if it contradicts what is known of it."""
        entries = self.index.insert(
            piece.hashes,
            piece.parent,
            piece.start,
            owner.tenant,
            owner.conversation,
            priority=owner.priority,
        )
        self.doomed.discard(entries.tolist())
        rows = np.asarray(piece.blocks, np.int32)
        fresh = self.index.dram[entries] < 0
        self.arena.free(rows[~fresh].tolist())
        self.enter(entries[fresh], "dram", rows[fresh])
        self._note(owner, now)
        if len(dirty := entries[self.dirty(entries)]):
            self.on_dirty(dirty)

    def belongs(self, hashes: bytes, parent: bytes, start: int, owner: Owner, now: float) -> None:
        """A run that is all here was offered again: its conversation runs through it."""
        if owner.conversation and len(hashes):
            self.index.insert(hashes, parent, start, owner.tenant, owner.conversation, priority=owner.priority)
            self._note(owner, now)

    def _note(self, owner: Owner, now: float) -> None:
        if not owner.conversation:
            return
        self.index.conversations.touch(owner.tenant, owner.conversation, now)
        if owner.priority == "vip":
            try:
                self.index.conversations.pin(owner.tenant, owner.conversation, now + VIP_S)
            except Overloaded as e:
                log.info("conversation %s is not pinned: %s", owner.conversation, e)

    def enter(self, entries: Entries, tier: Tier, places: npt.NDArray[np.signedinteger] | Sequence[int]) -> None:
        """They are in `tier` from now on, at these places. They were not before."""
        if not len(entries):
            return
        clean = self._count_clean(entries)
        self.column(tier)[entries] = places
        self.num_clean += self._count_clean(entries) - clean
        self.num_blocks[tier] += len(entries)
        self.policy.added(entries, tier)
        self.on_added(tier)

    # ------------------------------------------------------------ out

    def leave(self, entries: Entries, tier: Tier, reason: str, *, keep_places: bool = False) -> list[int]:
        """They are in `tier` no more; what was only there is gone. The places that they had, which are freed, in memory
        and on disk, unless keep_places."""
        if not len(entries):
            return []
        column = self.column(tier)
        places = column[entries].tolist()
        clean = self._count_clean(entries)
        column[entries] = -1
        self.num_clean += self._count_clean(entries) - clean
        self.num_blocks[tier] -= len(entries)
        self.policy.removed(entries, tier)
        if tier == "dram":
            self.arena.free(places)
        elif tier == "disk" and not keep_places:
            self.free_places(places)
        self._states[tier].num_evicted[reason] += len(entries)
        if reason == "damaged":  # what memory has is all there is of it
            again = entries[self.dirty(entries)]
            if len(again := again[~self.doomed.among(again)]):
                self.on_dirty(again)
        self._remove_empty(entries)
        return list(places)

    def _remove_empty(self, entries: Entries) -> None:
        self.doomed.discard(self.index.remove_empty(entries).tolist())

    def _count_clean(self, entries: Entries) -> int:
        index = self.index
        return int(((index.dram[entries] >= 0) & ((index.disk[entries] >= 0) | (index.object[entries] >= 0))).sum())

    def make_room(self, n: int, *, around: bytes = b"") -> int:
        """How many rows are free, after evicting as many as `n` needs of those that cost nothing. Never waits. around:
        hashes of blocks that must not make room, since what comes continues them."""
        if (missing := n - self.arena.num_free) > 0:
            entries = self.index.find(around)
            entries = entries[entries >= 0]
            self.pins.hold(entries)
            self.evict_memory(missing, "room")
            self.pins.unhold(entries)
        return self.arena.num_free

    def evict_memory(self, n: int, reason: str) -> int:
        """Let up to `n` blocks go from memory that are in a lower tier too (or all the same, where there is none that
        takes them). How many went. Looks at the first few thousand victims only."""
        gone = 0
        ask = max(n, _EVICT_AT_ONCE)
        while gone < n and (self.num_clean or self.may_drop_dirty()):
            victims = self.policy.victims(ask, "dram")
            out = self._evictable(victims, n - gone)
            self.leave(out, "dram", reason)
            gone += len(out)
            if len(victims) < ask or ask >= _MOST_ASKED:
                break
            ask = _MOST_ASKED
        return gone

    def _evictable(self, victims: Entries, n: int) -> Entries:
        """The first `n` of the victims that may go now. A chain is cut from its end: what has a child that stays, stays
        too."""
        if not len(victims):
            return NONE
        if self.may_drop_dirty():
            return victims[:n]
        return self.without(victims, self.dirty(victims))[:n]

    def without(self, victims: Entries, stays: npt.NDArray[np.bool_]) -> Entries:
        """Victims, children before parents, but for those that stay and, since a chain is cut from its end, those above
        them."""
        if not stays.any():
            return victims
        parents = self.index.parent[victims].tolist()
        blocked: set[int] = set()
        out: list[int] = []
        for entry, parent, kept in zip(victims.tolist(), parents, stays.tolist(), strict=True):
            if kept or entry in blocked:
                blocked.add(parent)
            else:
                out.append(entry)
        return np.asarray(out, np.int32)

    def remove_doomed(self, entries: Entries) -> Removed:
        """Of these, children before parents, those that are doomed still: out of every tier and out of the index; what
        bytes are being read from or written to leaves memory as soon as that has ended."""
        entries = entries[self.doomed.among(entries)]
        entries = entries[self.index.depth[entries] >= 0]
        busy = self.index.num_pins[entries] > 0
        idle = entries[~busy]
        places = self.leave(entries[self.index.disk[entries] >= 0], "disk", "deleted", keep_places=True)
        left = entries[self.index.depth[entries] >= 0]
        objects = self.leave(left[self.index.object[left] >= 0], "object", "deleted")
        self._remove_from_memory(idle[self.index.depth[idle] >= 0])
        self.doomed.discard(idle.tolist())
        return Removed(len(entries), places, sorted(set(objects)))

    def _remove_from_memory(self, entries: Entries) -> None:
        self.leave(entries[self.index.dram[entries] >= 0], "dram", "deleted")
        self._remove_empty(entries[self.index.depth[entries] >= 0])

    def _unpinned(self, entries: Entries) -> None:
        """What was doomed, or has lost its last tier meanwhile, goes now."""
        if len(self.doomed):
            # What is lower down too is remove_doomed()'s.
            memory_only = (self.index.disk[entries] < 0) & (self.index.object[entries] < 0)
            over = [e for e in entries[memory_only].tolist() if e in self.doomed]
            self.doomed.discard(over)
            self._remove_from_memory(np.asarray(sorted(set(over), key=over.index), np.int32))
        left = np.unique(entries[self.index.depth[entries] >= 0])
        if len(empty := left[~self.index.in_some_tier(left)]):
            self._remove_empty(empty)

    def check(self) -> None:
        """Raises KVError unless index, policy, pins and counts agree. Looks at everything."""
        self.index.check()
        self.policy.check()
        self.pins.check()
        self.arena.check()
        entries = self.index.entries()
        for tier, num in self.num_blocks.items():
            counted = int((self.column(tier)[entries] >= 0).sum())
            if counted != num:
                raise KVError(f"{counted} blocks in tier {tier}, {num} on the books", counted=counted, expected=num)
        if (clean := self._count_clean(entries)) != self.num_clean:
            raise KVError(f"{clean} blocks are in memory and lower down, {self.num_clean} on the books", counted=clean)
        self.doomed.check(entries)
        rows = self.index.dram[entries]
        rows = rows[rows >= 0]
        if len(np.unique(rows)) != len(rows):
            raise KVError("two entries have one row of the arena", num_rows=len(rows))
