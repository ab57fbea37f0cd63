"""Parents and children, also of blocks whose parent is not here (yet): another node's, or lost."""

from __future__ import annotations

import numpy as np

from distserve_kvstore.columns import Columns, Entries


class Links:
    """The columns parent, first_child, next_sibling, previous_sibling and num_children are written here and nowhere
    else."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._far: dict[int, bytes] = {}  # entry without a parent here -> its parent's hash
        self._waiting: dict[bytes, list[int]] = {}  # a parent's hash -> those; not of depth 0: no root ever comes

    def far_parent(self, entry: int) -> bytes | None:
        """The hash of its parent, if that is not here."""
        return self._far.get(entry)

    def waiting_for(self, name: bytes) -> list[int]:
        return self._waiting.get(name, [])

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def leave_far(self, entry: int, parent: bytes) -> None:
        """A new entry whose parent is not here."""
        self._far[entry] = parent
        if self._columns.depth[entry]:
            self._waiting.setdefault(parent, []).append(entry)

    def put_under(self, child: int, parent: int) -> None:
        c = self._columns
        c.parent[child] = parent
        first = int(c.first_child[parent])
        c.next_sibling[child] = first
        if first >= 0:
            c.previous_sibling[first] = child
        c.first_child[parent] = child
        c.num_children[parent] += 1

    def put_under_new(self, children: Entries, parents: Entries) -> None:
        """The same for many, each the only child of its parent."""
        c = self._columns
        c.parent[children] = parents
        c.first_child[parents] = children
        c.num_children[parents] = 1

    def adopt(self, parent: int, name: bytes) -> list[int]:
        """Those that waited for `parent`, called so, are put under it."""
        children = self._waiting.pop(name, [])
        for child in children:
            del self._far[child]
            self.put_under(child, parent)
        return children

    def cut(self, entries: Entries) -> bool:
        """Takes them out, unless a child of one would stay: False, and nothing changes."""
        c = self._columns
        parents = c.parent[entries]
        inner = parents >= 0
        np.subtract.at(c.num_children, parents[inner], 1)
        if c.num_children[entries].any():
            np.add.at(c.num_children, parents[inner], 1)
            return False
        c.first_child[entries] = -1  # their parents among them need no repair
        for entry, parent in zip(entries.tolist(), parents.tolist(), strict=True):
            if parent < 0:
                self._forget_far(entry)
            elif c.num_children[parent] == 0:
                c.first_child[parent] = -1
            else:
                self._unchain(entry, parent)
        return True

    def children_of(self, entry: int) -> list[int]:
        following = self._columns.next_sibling.data
        child, found = int(self._columns.first_child[entry]), []
        while child >= 0:
            found.append(child)
            child = following[child]
        return found

    def below(self, entry: int) -> list[int]:
        """`entry` and all its descendants, parents before children."""
        found = [entry]
        for one in found:
            found += self.children_of(one)
        return found

    def _unchain(self, entry: int, parent: int) -> None:
        c = self._columns
        before, after = int(c.previous_sibling[entry]), int(c.next_sibling[entry])
        if before >= 0:
            c.next_sibling[before] = after
        else:
            c.first_child[parent] = after
        if after >= 0:
            c.previous_sibling[after] = before

    def _forget_far(self, entry: int) -> None:
        parent = self._far.pop(entry)
        if waiting := self._waiting.get(parent):
            waiting.remove(entry)
            if not waiting:
                del self._waiting[parent]

    def check(self) -> str:
        """What is wrong; "" if nothing is. Looks at every entry."""
        c = self._columns
        entries = c.entries()
        parents = c.parent[entries]
        inner = entries[parents >= 0]
        counts = np.zeros(c.capacity, np.int32)
        np.add.at(counts, c.parent[inner], 1)
        if (counts[entries] != c.num_children[entries]).any():
            return "children are not as many as counted"
        if (c.depth[inner] != c.depth[c.parent[inner]] + 1).any() or (c.depth[c.parent[inner]] < 0).any():
            return "a child is not one deeper than its parent"
        if set(entries[parents < 0].tolist()) != set(self._far):
            return "an entry has neither a parent nor the name of one, or both"
        waiting = {entry: name for entry, name in self._far.items() if c.depth[entry] > 0}
        if {entry: name for name, listed in self._waiting.items() for entry in listed} != waiting:
            return "an entry without its parent does not wait for it"
        for entry in entries.tolist():
            children = self.children_of(entry)
            if len(children) != c.num_children[entry] or any(c.parent[child] != entry for child in children):
                return "a list of children has others"
        return ""
