"""Conversations: which blocks each runs through, pins of VIP conversations, what deleting one may take away."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from distserve.errors import Overloaded
from distserve.messages import Priority
from distserve_kvstore.columns import NONE, Columns, Entries
from distserve_kvstore.links import Links

_SPARE = 64  # entries of a heap that are not worth making it anew


@dataclass(slots=True, eq=False)
class Conversation:
    """Its blocks are its tips and their ancestors here. Several tips, none above another: other nodes hold what is
    between, or it has branched."""

    tenant: str
    name: str
    priority: Priority = "normal"
    tips: list[int] = field(default_factory=list)
    num_blocks: int = 0
    used_at: float = 0.0  # by touch()
    pinned_until: float = 0.0  # 0: not pinned


class Conversations:
    """The columns num_conversations and num_vips are written here and nowhere else.

    A block costs the same however many conversations run through it: only tips are listed, the rest is counted. Times
    are seconds of one clock, passed in.
    """

    def __init__(self, columns: Columns, links: Links) -> None:
        self._columns = columns
        self._links = links
        self._all: dict[tuple[str, str], Conversation] = {}
        self._at: dict[int, list[Conversation]] = {}  # tip -> whose
        self._by_expiry: list[tuple[float, str, str]] = []
        self.vip_limit = sys.maxsize  # most blocks that pin() may come to, in all; the node sets it
        self.num_vip_blocks = 0

    def __len__(self) -> int:
        return len(self._all)

    def get(self, tenant: str, name: str) -> Conversation | None:
        return self._all.get((tenant, name))

    def list(self, after: str = "", limit: int = 100) -> list[Conversation]:
        """In order of their names, those after `after`; more than `limit` only where the last name has several
        tenants. Looks at every one."""
        names = heapq.nsmallest(limit, {name for _, name in self._all if name > after})
        last = names[-1] if names else ""
        found = [one for (_, name), one in self._all.items() if after < name <= last]
        found.sort(key=lambda one: (one.name, one.tenant))
        while len(found) > limit and found[-1].name != found[limit - 1].name:
            found.pop()
        return found

    def of_tenant(self, tenant: str) -> Sequence[Conversation]:
        """Looks at every one."""
        return [one for (t, _), one in self._all.items() if t == tenant]

    def blocks_of(self, conversation: Conversation) -> Entries:
        """Children before parents."""
        return self._columns.deepest_first(np.fromiter(self._blocks(conversation), np.int32))

    def through(self, entry: int) -> str:
        """The name of one that runs through this block, "" if none does. Follows one of them down to its tip."""
        while self._columns.num_conversations[entry]:
            if here := self._at.get(entry):
                return here[0].name
            entry = next(c for c in self._links.children_of(entry) if self._columns.num_conversations[c])
        return ""

    def touch(self, tenant: str, name: str, now: float) -> None:
        if one := self.get(tenant, name):
            one.used_at = now

    def join(self, tenant: str, name: str, run: Entries, priority: Priority = "normal") -> Conversation:
        """It runs through `run`, blocks that follow one another, and what is above them."""
        one = self._all.get((tenant, name))
        if one is None:
            one = self._all[tenant, name] = Conversation(tenant, name)
        one.priority = priority
        new, replaced = self._news(one, run)
        if len(new):
            if replaced >= 0:
                self._remove_tip(one, replaced)
            self._add_tip(one, int(run[-1]))
            self._count(one, new)
        return one

    def pin(self, tenant: str, name: str, until: float) -> int:
        """Its blocks, those that it gets later too, are never evicted until then, within the quota of each tier. How
        many it has here.

        Overloaded (fields wanted, held, limit), and nothing changes, if that makes more VIP blocks than vip_limit.
        """
        one = self.get(tenant, name)
        blocks = self._blocks(one) if one else set()
        wanted = sum(self._columns.num_vips[block] == 0 for block in blocks)
        if self.num_vip_blocks + wanted > self.vip_limit:
            raise Overloaded(
                f"pinning {wanted} blocks more is over the quota: {self.num_vip_blocks} of {self.vip_limit} are pinned",
                wanted=int(wanted),
                held=self.num_vip_blocks,
                limit=self.vip_limit,
                retry_after_s=1.0,
            )
        if one is None:
            one = self._all[tenant, name] = Conversation(tenant, name)
        if not one.pinned_until:
            self._cherish(np.fromiter(sorted(self._blocks(one), key=self._columns.depth.item), np.int32))
        one.pinned_until = until
        heapq.heappush(self._by_expiry, (until, tenant, name))
        if len(self._by_expiry) > 2 * len(self._all) + _SPARE:  # pinned again and again: one each is enough
            self._by_expiry = [(o.pinned_until, o.tenant, o.name) for o in self._all.values() if o.pinned_until]
            heapq.heapify(self._by_expiry)
        return one.num_blocks

    def unpin(self, tenant: str, name: str) -> int:
        """How many blocks are not kept for it any more; they may be for others."""
        one = self.get(tenant, name)
        if one is None or not one.pinned_until:
            return 0
        one.pinned_until = 0.0
        blocks = self.blocks_of(one)
        self._columns.num_vips[blocks] -= 1
        self._let_go(blocks)
        self._drop_if_empty(one)
        return len(blocks)

    def expire(self, now: float) -> Sequence[Conversation]:
        """Unpins those whose time is over."""
        over: list[Conversation] = []
        while self._by_expiry and self._by_expiry[0][0] <= now:
            _, tenant, name = heapq.heappop(self._by_expiry)
            one = self.get(tenant, name)
            if one and one.pinned_until and one.pinned_until <= now:
                self.unpin(tenant, name)
                over.append(one)
        return over

    def deletable(self, tenant: str, name: str) -> Entries:
        """Its blocks that no other conversation runs through and nothing else is below of, children before parents."""
        one = self.get(tenant, name)
        if one is None:
            return NONE
        found: list[int] = []
        num_gone: dict[int, int] = {}  # children of the key
        for entry in self.blocks_of(one).tolist():
            alone = self._columns.num_conversations[entry] == 1
            if alone and self._columns.num_children[entry] == num_gone.get(entry, 0):
                found.append(entry)
                parent = int(self._columns.parent[entry])
                num_gone[parent] = num_gone.get(parent, 0) + 1
        return np.array(found, np.int32)

    def forget(self, tenant: str, name: str = "") -> None:
        """This conversation, or all of the tenant's, is no longer known, its pin is over. The blocks stay: to delete
        them ask for deletable() before."""
        for one in [self.get(tenant, name)] if name else self.of_tenant(tenant):
            if one is not None:
                self.unpin(tenant, one.name)
                self._columns.num_conversations[self.blocks_of(one)] -= 1
                for tip in list(one.tips):
                    self._remove_tip(one, tip)
                self._all.pop((tenant, one.name), None)  # unpin() may have

    def removing(self, entries: Entries) -> None:
        """These leave the index, children before parents: conversations end at their parents."""
        vips = self._columns.num_vips[entries]
        self.num_vip_blocks -= int(np.count_nonzero(vips))
        self._columns.num_vips[entries] = 0
        self._columns.num_conversations[entries] = 0
        if not self._at:
            return
        for entry in entries.tolist():
            parent = int(self._columns.parent[entry])
            for one in self._at.pop(entry, ()):
                one.tips.remove(entry)
                one.num_blocks -= 1
                if parent >= 0 and not (self._columns.num_children[parent] and parent in self._blocks(one)):
                    self._add_tip(one, parent)
                self._drop_if_empty(one)

    @contextmanager
    def growing_upward(self, entries: Sequence[int]) -> Iterator[None]:
        """Inside, these get a parent: what runs through them runs through it too, and what is above."""
        through: set[Conversation] = set()
        if self._at:
            for entry in entries:
                for below in self._links.below(entry):
                    through.update(self._at.get(below, ()))
        before = {one: self._blocks(one) for one in through}
        yield
        for one, blocks in before.items():
            self._count(one, np.fromiter(self._blocks(one) - blocks, np.int32))
            for tip in [tip for tip in one.tips if self._is_above_another(one, tip)]:
                self._remove_tip(one, tip)

    def check(self) -> str:
        """What is wrong; "" if nothing is. Looks at everything."""
        c = self._columns
        counts = np.zeros((2, c.capacity), np.int32)
        at: dict[int, list[int]] = {}
        for one in self._all.values():
            blocks = self.blocks_of(one)
            counts[0][blocks] += 1
            counts[1][blocks] += one.pinned_until > 0
            for tip in one.tips:
                at.setdefault(tip, []).append(id(one))
            if any(self._is_above_another(one, tip) for tip in one.tips):
                return "a tip lies above another of the same conversation"
            if one.num_blocks != len(blocks):
                return "a conversation has other blocks than counted"
        entries = c.entries()
        if {tip: sorted(map(id, those)) for tip, those in self._at.items()} != {k: sorted(v) for k, v in at.items()}:
            return "a tip is listed for others than those whose it is"
        if (counts[0][entries] != c.num_conversations[entries]).any() or (counts[1] > 0).sum() != self.num_vip_blocks:
            return "a block has other conversations than counted"
        if (counts[1][entries] != c.num_vips[entries]).any() or (c.depth[list(at)] < 0).any():
            return "a block has other pinned conversations than counted, or a tip is no entry"
        return ""

    def _blocks(self, one: Conversation) -> set[int]:
        found: set[int] = set()
        for tip in one.tips:
            for entry in self._columns.ancestors(tip):
                if entry in found:
                    break
                found.add(entry)
        return found

    def _is_above_another(self, one: Conversation, tip: int) -> bool:
        return any(tip in self._columns.ancestors(other) for other in one.tips if other != tip)

    def _news(self, one: Conversation, run: Entries) -> tuple[Entries, int]:
        """What of the run and above it is new to it, and the tip that its new tip comes after (-1: none)."""
        above = int(self._columns.parent[run[0]])
        if one.tips:  # nothing of it is below a tip
            at = np.flatnonzero(np.isin(run, one.tips))
            if len(at):
                return run[at[-1] + 1 :], int(run[at[-1]])
            if above in one.tips:
                return run, above
        mine = self._blocks(one) if one.tips else set()
        path = [*run[::-1].tolist(), *self._columns.ancestors(above)]
        new = [entry for entry in path if entry not in mine]
        return np.array(new[::-1], np.int32), next((tip for tip in one.tips if tip in path), -1)

    def _count(self, one: Conversation, new: Entries) -> None:
        one.num_blocks += len(new)
        self._columns.num_conversations[new] += 1
        if one.pinned_until:
            self._cherish(new)

    def _cherish(self, entries: Entries) -> None:
        self.num_vip_blocks += int(np.count_nonzero(self._columns.num_vips[entries] == 0))
        self._columns.num_vips[entries] += 1
        self._columns.watcher.cherished(entries)

    def _let_go(self, entries: Entries) -> None:
        free = entries[self._columns.num_vips[entries] == 0]
        self.num_vip_blocks -= len(free)
        if len(free):
            self._columns.watcher.released(free)

    def _add_tip(self, one: Conversation, tip: int) -> None:
        one.tips.append(tip)
        self._at.setdefault(tip, []).append(one)

    def _remove_tip(self, one: Conversation, tip: int) -> None:
        one.tips.remove(tip)
        self._at[tip].remove(one)
        if not self._at[tip]:
            del self._at[tip]

    def _drop_if_empty(self, one: Conversation) -> None:
        if not one.tips and not one.pinned_until:
            self._all.pop((one.tenant, one.name), None)
