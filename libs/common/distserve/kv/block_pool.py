"""Which blocks of a KV pool are free, which are in use, and which are kept because their content may be wanted again.
Plain arithmetic: the bytes live elsewhere (engine/paged_cache.py)."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

from distserve.errors import KVError, PoolExhausted

FIRST_BLOCK = 1  # block 0 takes the writes of padding and is never allocated


class BlockPool:
    """Block ids 1 … num_blocks-1. Each is free, used or cached:

        free ── allocate ──> used (1 reference) ── acquire ──> used (2 …) ── free ──> … ── free, the last one:
          ^                    ^                                                with a name -> cached
          |                    └────────────────── acquire ───────────────────────── cached    without -> free
          └─────────────────────────────────── allocate, when nothing is free: the longest unused goes

    A name is the hash of a block's content (kv/hashing.py). Who has computed or received a full block names it; it is
    never written again as long as it has that name. Of two blocks with the same content the first has the name.

    Not thread-safe: one loop owns it. Free ids are kept as maximal runs, sorted by start, so that an allocation is
    contiguous where it can be and a transfer of it is one copy instead of many:

        starts   [1,        40, ...]
        lengths  [12,        3, ...]     a run is [start, start + length); neighbours never touch
    """

    def __init__(self, num_blocks: int, *, keep: bool = True) -> None:
        """A pool of `num_blocks` blocks, the padding block included. keep: False: nothing is named, so nothing cached.
        Raises KVError if nothing would be usable."""
        if num_blocks < 2:
            raise KVError(
                f"num_blocks is {num_blocks}, must be at least 2: block 0 is for padding",
                num_blocks=num_blocks,
                expected=">=2",
            )
        self._num_blocks = num_blocks
        self._keep = keep
        self._starts = [FIRST_BLOCK]
        self._lengths = [num_blocks - FIRST_BLOCK]
        self._num_free = num_blocks - FIRST_BLOCK
        self._references = [0] * num_blocks
        self._names: dict[int, bytes] = {}
        self._by_name: dict[bytes, int] = {}
        self._parents: dict[bytes, bytes] = {}  # of a name, the one before it in its chain
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first is the first to go
        self.on_stored: Callable[[Sequence[bytes]], None] = lambda names: None  # can be found from now on
        self.on_removed: Callable[[Sequence[bytes]], None] = lambda names: None  # can't any more

    @property
    def num_total(self) -> int:
        """Usable blocks: all but block 0."""
        return self._num_blocks - FIRST_BLOCK

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks without an owner whose content may be found again."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that allocate() can give: free ones and, at the price of what they hold, cached ones."""
        return self._num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_total - self._num_free - len(self._cached)

    @property
    def names(self) -> Sequence[bytes]:
        """Everything that can be found here, in no order."""
        return list(self._by_name)

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with one reference each, or PoolExhausted (fields wanted, free, total) and nothing changes.

        Best fit: the shortest free run that holds all of them; failing that the longest runs, until there are enough.
        """
        if n < 0:
            raise KVError(f"allocate({n}): the number of blocks must not be negative", wanted=n, expected=">=0")
        if n > self.num_available:
            raise PoolExhausted(
                f"{n} KV blocks wanted, {self.num_available} of {self.num_total} are free",
                wanted=n,
                free=self.num_available,
                total=self.num_total,
            )
        if (missing := n - self._num_free) > 0:  # all that is free, and of the rest what nobody has used for longest
            runs = zip(self._starts, self._lengths, strict=True)
            ids = sorted([i for start, length in runs for i in range(start, start + length)] + self._evict(missing))
            self._starts, self._lengths, self._num_free = [], [], 0
        else:
            ids = self._take(n) if n else []
            self._num_free -= n
        for block_id in ids:
            self._references[block_id] = 1
        return ids

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest unbroken beginning of `names` that is here. They may go at the next allocate():
        acquire() them first."""
        ids: list[int] = []
        for name in names:
            block_id = self._by_name.get(name)
            if block_id is None:
                break
            ids.append(block_id)
        return ids

    def acquire(self, ids: Sequence[int]) -> None:
        """One more reference to each of these, which are used or cached; free() gives it back. KVError, and nothing
        changes, if one is free."""
        for block_id in ids:
            if not FIRST_BLOCK <= block_id < self._num_blocks or not (
                self._references[block_id] or block_id in self._cached
            ):
                raise KVError(
                    f"block {block_id} can't be acquired: nobody uses it, nothing is in it", block_id=block_id
                )
        for block_id in ids:
            self._references[block_id] += 1
            self._cached.pop(block_id, None)

    def name(self, ids: Sequence[int], names: Sequence[bytes], parent: bytes = b"") -> None:
        """The content of these used blocks is final, and `names` are its hashes, in the order of their chain; `parent`
        is the hash before the first. Named again alike: no change. KVError, and nothing changes, if one is not used, or
        has another name."""
        if not self._keep:
            return
        given: dict[bytes, int] = {}
        for block_id, name in zip(ids, names, strict=True):
            if not FIRST_BLOCK <= block_id < self._num_blocks or not self._references[block_id]:
                raise KVError(f"block {block_id} can't be named: nobody uses it", block_id=block_id)
            if self._names.get(block_id, name) != name:
                raise KVError(f"block {block_id} has another name", block_id=block_id)
            if name not in self._by_name:
                given.setdefault(name, block_id)
        if len(set(given.values())) != len(given):
            raise KVError("a block is given two names", num_blocks=len(set(given.values())), num_names=len(given))
        self._parents.update((name, before) for before, name in pairwise((parent, *names)) if name in given)
        self._by_name.update(given)
        self._names.update((block_id, name) for name, block_id in given.items())
        if given:
            self.on_stored(list(given))

    def free(self, ids: Sequence[int]) -> None:
        """Give one reference to each back, in the order of their chain: the last is the first to be evicted, and after
        it those that come before it in its chain, whoever has left them here. A block without a reference is a
        programming error, and so is one named twice: KVError, and nothing changes."""
        for block_id in ids:
            if not FIRST_BLOCK <= block_id < self._num_blocks:
                raise KVError(
                    f"block {block_id} is not of this pool, whose blocks are {FIRST_BLOCK}..{self._num_blocks - 1}",
                    block_id=block_id,
                )
            if not self._references[block_id]:
                raise KVError(f"block {block_id} is freed twice", block_id=block_id)
        in_order = sorted(ids)
        for before, block_id in pairwise(in_order):
            if before == block_id:
                raise KVError(f"block {block_id} is freed twice", block_id=block_id)
        nameless: list[int] = []
        for block_id in reversed(ids):
            self._references[block_id] -= 1
            if not self._references[block_id]:
                if block_id in self._names:
                    self._cached[block_id] = None
                else:
                    nameless.append(block_id)
        self._give_all(nameless)
        if ids:
            self._renew_before(self._names.get(ids[0], b""))

    def forget(self, ids: Sequence[int]) -> None:
        """The content of these is wrong after all: they lose their names, whoever else uses them."""
        gone = [self._unname(block_id) for block_id in ids if block_id in self._names]
        freed = [block_id for block_id in ids if self._cached.pop(block_id, block_id) is None]
        self._give_all(freed)
        if gone:
            self.on_removed(gone)

    def drop_cached(self) -> int:
        """Forget all that nobody uses; how many blocks that frees."""
        gone = self._evict(len(self._cached))
        self._give_all(gone)
        return len(gone)

    def check(self) -> None:
        """Raises KVError if free + cached + used == total does not hold or the runs are inconsistent."""
        covered = bytearray(1 if n else 0 for n in self._references)
        used = sum(covered)
        for block_id in self._cached:
            if covered[block_id] or block_id not in self._names:
                raise KVError(f"cached block {block_id} is used too, or has no name", block_id=block_id)
            covered[block_id] = 1
        for start, length in zip(self._starts, self._lengths, strict=True):
            if length < 1 or 1 in covered[start : start + length]:
                raise KVError(f"free run [{start}, {start + length}) is empty or overlaps others", block_id=start)
            covered[start : start + length] = b"\x01" * length
        free, cached = sum(self._lengths), self.num_cached
        if free != self._num_free or free + cached + used != self.num_total or self._references[0]:
            raise KVError(
                f"free {free} (counted {self._num_free}) + cached {cached} + used {used} is not total {self.num_total}",
                free=free,
                cached=cached,
                used=used,
                total=self.num_total,
            )
        if {name: block_id for block_id, name in self._names.items()} != self._by_name:
            raise KVError("a name leads to another block than bears it", num_names=len(self._by_name))
        if self._parents.keys() - self._by_name.keys():
            raise KVError("a parent is kept of a name that is gone", num_names=len(self._by_name))

    def _renew_before(self, name: bytes) -> None:
        """What comes before it in its chain and is kept goes after it: without them it could not be found."""
        for _ in range(len(self._parents)):  # a chain of hashes has no circle, names of another kind might
            name = self._parents.get(name, b"")
            block_id = self._by_name.get(name)
            if block_id is None:
                break
            if block_id in self._cached:
                self._cached.move_to_end(block_id)

    def _unname(self, block_id: int) -> bytes:
        name = self._names.pop(block_id)
        del self._by_name[name]
        self._parents.pop(name, None)
        return name

    def _evict(self, n: int) -> list[int]:
        """The n blocks that have been cached longest lose their names; what becomes of them is the caller's."""
        gone = [self._cached.popitem(last=False)[0] for _ in range(n)]
        if gone:
            self.on_removed([self._unname(block_id) for block_id in gone])
        return gone

    def _give_all(self, ids: list[int]) -> None:
        """Blocks become free."""
        returned = sorted(ids)
        start = 0
        for stop in range(1, len(returned) + 1):
            if stop == len(returned) or returned[stop] != returned[stop - 1] + 1:
                self._give(returned[start], stop - start)
                start = stop
        self._num_free += len(returned)

    def _take(self, wanted: int) -> list[int]:
        """Removes `wanted` ids, of which there are enough, from the runs that suit best."""
        ids: list[int] = []
        if wanted > max(self._lengths):
            by_length = sorted(range(len(self._lengths)), key=self._lengths.__getitem__, reverse=True)
            whole = set[int]()
            for i in by_length:
                if self._lengths[i] > wanted:
                    break
                ids.extend(range(self._starts[i], self._starts[i] + self._lengths[i]))
                whole.add(i)
                wanted -= self._lengths[i]
            self._starts = [start for i, start in enumerate(self._starts) if i not in whole]
            self._lengths = [length for i, length in enumerate(self._lengths) if i not in whole]
        if wanted:
            best = min((i for i, n in enumerate(self._lengths) if n >= wanted), key=self._lengths.__getitem__)
            start = self._starts[best]
            ids.extend(range(start, start + wanted))
            if wanted == self._lengths[best]:
                del self._starts[best], self._lengths[best]
            else:
                self._starts[best] += wanted
                self._lengths[best] -= wanted
        return ids

    def _give(self, start: int, length: int) -> None:
        """Inserts a run and merges it with the neighbours it touches."""
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and start + length == self._starts[i]:
            length += self._lengths[i]
            del self._starts[i], self._lengths[i]
        if i and self._starts[i - 1] + self._lengths[i - 1] == start:
            self._lengths[i - 1] += length
        else:
            self._starts.insert(i, start)
            self._lengths.insert(i, length)
