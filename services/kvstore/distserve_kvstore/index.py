"""Which blocks a node has, by content: names, places in the tiers, chains. Not thread-safe: the node's loop owns it. No
I/O, no clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distserve.errors import KVError
from distserve.kv.hashing import HASH_BYTES
from distserve.messages import Priority
from distserve.messages.store import MAX_DEPTH
from distserve_kvstore.columns import BATCH, NONE, NORMAL, Columns, Entries, Keys
from distserve_kvstore.conversations import Conversations
from distserve_kvstore.hash_table import NameTable
from distserve_kvstore.links import Links
from distserve_kvstore.tenants import Tenants


class BlockIndex(Columns):
    """An entry is one block. It is in memory iff `dram[entry]` >= 0, on disk iff `disk[entry]` >= 0, in an object iff
    `object[entry]` >= 0. Whoever moves a block writes the column, then tells the policy (eviction/base.py).

    An entry number is good until the entry is removed, and may then mean another block: pin it across an await.
    """

    def __init__(self, capacity: int = 1024) -> None:
        """capacity: entries for which room is reserved. With more than that the columns double and are copied, which
        takes about 0.1 s a million entries: give what the tiers can hold."""
        super().__init__(capacity)
        self._table = NameTable(capacity)
        self._links = Links(self)
        self._tenants = Tenants()
        self.conversations = Conversations(self, self._links)

    @property
    def num_bytes(self) -> int:
        """Of columns and table; conversations and links to blocks of other nodes come on top."""
        return super().num_bytes + self._table.num_bytes

    def find(self, hashes: bytes) -> Entries:
        """Of each of these packed hashes its entry, or -1."""
        keys = _keys(hashes)
        found = self._table.find(keys, self.hashes)
        found[~keys.any(axis=1)] = -1  # zeros are no hash; entries that nobody has bear them
        return found

    def longest_prefix(self, hashes: bytes) -> Entries:
        """The unbroken beginning of these that is in some tier."""
        entries = self.find(hashes)
        missing = np.flatnonzero((entries < 0) | ~self.in_some_tier(entries))
        return entries[: missing[0]] if len(missing) else entries

    def insert(
        self,
        hashes: bytes,
        parent: bytes,
        start: int,
        tenant: str = "",
        conversation: str = "",
        *,
        priority: Priority = "normal",
    ) -> Entries:
        """Entries for a run of blocks that follow one another, the first at depth `start` after `parent` (its hash; the
        root's at depth 0). Those that are here are kept; new ones are in no tier. Their parent may be unknown: they are
        linked when it comes (insert shallow ones first where you can). A named conversation runs through all of them
        from now on. batch: first to be evicted, until they come with another priority.

        KVError, and nothing changes: a hash twice, or a depth or parent that contradicts what is known.
        """
        keys = _keys(hashes)
        if not len(keys):
            return NONE
        if not keys.any(axis=1).all():
            raise KVError("a hash to insert is all zeros", num_blocks=len(keys), start=start)
        if not 0 <= start <= MAX_DEPTH - len(keys) or len(parent) != HASH_BYTES:
            raise KVError(
                f"a run of {len(keys)} blocks starts at depth {start} after a hash of {len(parent)} bytes, must lie "
                f"between 0 and {MAX_DEPTH}, after {HASH_BYTES} bytes",
                start=start,
                size_bytes=len(parent),
            )
        entries = self._table.find(keys, self.hashes)
        above = int(self.find(parent)[0]) if start else -1
        self._refuse_contradictions(hashes, keys, entries, parent, above, start)
        new = entries < 0
        if new.any():
            entries[new] = self._add(keys[new], np.flatnonzero(new) + start, tenant, priority)
        if priority != "batch":
            self.priority[entries] = NORMAL
        self._link(hashes, entries, new, parent, above)
        if conversation:
            self.conversations.join(tenant, conversation, entries, priority)
        return entries

    def remove(self, entries: Entries) -> None:
        """They must be in no tier, without pins, and without children that stay: else KVError, nothing changes."""
        if not len(entries):
            return
        if len(np.unique(entries)) != len(entries) or (self.depth[entries] < 0).any():
            raise KVError("an entry to remove is named twice, or isn't one", num_entries=len(entries))
        if self.num_pins[entries].any() or self.in_some_tier(entries).any():
            raise KVError("an entry to remove is pinned, or still in a tier", num_entries=len(entries))
        entries = self.deepest_first(entries)
        if not self._links.cut(entries):
            raise KVError("an entry to remove has children that would stay", num_entries=len(entries))
        self.conversations.removing(entries)
        self._table.discard(entries, self.hashes)
        self._tenants.discard(self.tenant[entries])
        self._release(entries)

    def remove_empty(self, entries: Entries) -> Entries:
        """Removes those of `entries` that are in no tier and have neither pins nor children, then their parents of
        which that is true; returns what was removed, children first. A block that was lost in the middle of a chain
        stays, in no tier, until its descendants are gone."""
        gone: list[int] = []
        num_gone: dict[int, int] = {}  # children of the key
        for entry in self.deepest_first(entries).tolist():
            for one in self.ancestors(entry):
                if (
                    max(self.dram[one], self.disk[one], self.object[one]) >= 0
                    or self.num_pins[one]
                    or self.num_children[one] != num_gone.get(one, 0)
                ):
                    break
                gone.append(one)
                num_gone[one] = -1  # never again
                parent = int(self.parent[one])
                num_gone[parent] = num_gone.get(parent, 0) + 1
        removed = np.array(gone, np.int32)
        self.remove(removed)
        return removed

    def hash_of(self, entry: int) -> bytes:
        name: bytes = self.hashes[entry].tobytes()
        return name

    def hashes_of(self, entries: Entries) -> bytes:
        """Packed."""
        return self.hashes[entries].tobytes()

    def parent_hash_of(self, entry: int) -> bytes:
        """Also where the parent isn't here; the root's at depth 0."""
        parent = int(self.parent[entry])
        far = self._links.far_parent(entry)
        return self.hash_of(parent) if far is None else far

    def chain_from(self, tip: int) -> Entries:
        """From the first ancestor that is here, unbroken, down to `tip`."""
        return np.array(list(self.ancestors(tip)), np.int32)[::-1]

    def children_of(self, entry: int) -> list[int]:
        return self._links.children_of(entry)

    def tenant_of(self, entry: int) -> str:
        return self._tenants.name(int(self.tenant[entry]))

    def of_tenant(self, tenant: str) -> Entries:
        """All of a tenant's, children before parents. Looks at every entry."""
        entries = self.entries()
        return self.deepest_first(entries[self.tenant[entries] == self._tenants.number(tenant)])

    def check(self) -> None:
        """Raises KVError if names, links, counts or conversations are inconsistent. Looks at everything."""
        entries = self.entries()
        numbers, counts = np.unique(self.tenant[entries], return_counts=True)
        if len(entries) != len(self) or len(self._table) != len(self):
            wrong = f"{len(entries)} entries, {len(self._table)} names, {len(self)} counted"
        elif not self._table.check(self.hashes):
            wrong = "a name does not lead to its entry"
        elif dict(zip(numbers.tolist(), counts.tolist(), strict=True)) != self._tenants.counts():
            wrong = "tenants have other numbers of blocks than counted"
        elif (self.num_pins[entries] < 0).any():
            wrong = "an entry has less than no pins"
        else:
            wrong = self._links.check() or self.conversations.check()
        if wrong:
            raise KVError(f"the index is inconsistent: {wrong}", num_entries=len(self))

    def _refuse_contradictions(
        self, hashes: bytes, keys: Keys, entries: Entries, parent: bytes, above: int, start: int
    ) -> None:
        """KVError if this run can't be true together with what is known."""
        known = np.flatnonzero(entries >= 0)
        inner = known[known > 0]
        before = entries[inner - 1]  # -1: new, then the known one must be waiting for it
        wrong = (
            (start and above >= 0 and self.depth[above] != start - 1)
            or (self.depth[entries[known]] != known + start).any()
            or (before[before >= 0] != self.parent[entries[inner[before >= 0]]]).any()
            or (entries[0] >= 0 and self.parent_hash_of(int(entries[0])) != parent)
        )
        for i in inner[before < 0].tolist():
            wrong = wrong or self._links.far_parent(int(entries[i])) != _hash(hashes, i - 1)
        new = np.flatnonzero(entries < 0)
        if len(np.unique(keys[new, 0])) < len(new):
            wrong = wrong or len({_hash(hashes, i) for i in new.tolist()}) < len(new)
        if self._links.num_waiting:
            for i in new.tolist():
                children = self._links.waiting_for(_hash(hashes, i))
                wrong = wrong or any(self.depth[child] != start + i + 1 for child in children)
        if start and above < 0:
            wrong = wrong or any(_hash(hashes, i) == parent for i in new.tolist())
        if wrong:
            raise KVError(
                f"a run of {len(keys)} blocks from depth {start} contradicts itself or the index",
                num_blocks=len(keys),
                start=start,
            )

    def _add(self, keys: Keys, depths: NDArray[np.intp], tenant: str, priority: Priority) -> Entries:
        entries = self._allocate(len(keys))
        self.hashes[entries] = keys
        self.depth[entries] = depths
        self.tenant[entries] = self._tenants.add(tenant, len(keys))
        self.priority[entries] = BATCH if priority == "batch" else NORMAL
        self._table.add(entries, self.hashes)
        return entries

    def _link(self, hashes: bytes, entries: Entries, new: NDArray[np.bool_], parent: bytes, above: int) -> None:
        """Links what is new, and those that waited for it."""
        both = new[1:] & new[:-1]
        self._links.put_under_new(entries[1:][both], entries[:-1][both])
        for i in (np.flatnonzero(new[1:] & ~new[:-1]) + 1).tolist():
            self._links.put_under(int(entries[i]), int(entries[i - 1]))
        if new[0] and above >= 0:
            self._links.put_under(int(entries[0]), above)
        elif new[0]:
            self._links.leave_far(int(entries[0]), parent)
        if self._links.num_waiting:
            for i in np.flatnonzero(new).tolist():
                if waiting := self._links.waiting_for(name := _hash(hashes, i)):
                    with self.conversations.growing_upward(waiting):
                        children = self._links.adopt(int(entries[i]), name)
                    self.watcher.linked(np.array(children, np.int32))


def _keys(hashes: bytes) -> Keys:
    if len(hashes) % HASH_BYTES:
        raise KVError(
            f"packed hashes have {len(hashes)} bytes, must be a multiple of {HASH_BYTES}",
            size_bytes=len(hashes),
            expected=f"a multiple of {HASH_BYTES}",
        )
    return np.frombuffer(hashes, np.uint64).reshape(-1, 4)


def _hash(hashes: bytes, i: int) -> bytes:
    return hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
