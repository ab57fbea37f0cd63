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
        self._evict(n - self._num_free)
        ids: list[int] = []
        while len(ids) < n:
            ids.extend(self._take(n - len(ids)))
        for block_id in ids:
            self._references[block_id] = 1
        self._num_free -= n
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

    def name(self, ids: Sequence[int], names: Sequence[bytes]) -> None:
        """The content of these used blocks is final, and `names` are its hashes. Named again alike: no change. KVError,
        and nothing changes, if one is not used, or has another name."""
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
        self._by_name.update(given)
        self._names.update((block_id, name) for name, block_id in given.items())
        if given:
            self.on_stored(list(given))

    def free(self, ids: Sequence[int]) -> None:
        """Give one reference to each back, in the order of their chain: the last is the first to be evicted. A block
        without a reference is a programming error, and so is one named twice: KVError, and nothing changes."""
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

    def drop_cached(self) -> int:
        """Forget all that nobody uses; how many blocks that frees."""
        return self._evict(len(self._cached))

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

    def _evict(self, n: int) -> int:
        """The n blocks (none if n is not positive) that have been cached longest become free."""
        gone: list[int] = []
        while len(gone) < n:
            gone.append(self._cached.popitem(last=False)[0])
        if gone:
            names = [self._names.pop(block_id) for block_id in gone]
            for name in names:
                del self._by_name[name]
            self._give_all(gone)
            self.on_removed(names)
        return len(gone)

    def _give_all(self, ids: list[int]) -> None:
        """Blocks become free."""
        returned = sorted(ids)
        start = 0
        for stop in range(1, len(returned) + 1):
            if stop == len(returned) or returned[stop] != returned[stop - 1] + 1:
                self._give(returned[start], stop - start)
                start = stop
        self._num_free += len(returned)

    def _take(self, wanted: int) -> range:
        """Removes up to `wanted` ids from the run that suits best."""
        best = -1
        for i, length in enumerate(self._lengths):
            if best < 0:
                best = i
                continue
            current = self._lengths[best]
            fits_better = length >= wanted and (current < wanted or length < current)
            longer = current < wanted and length > current
            if fits_better or longer:
                best = i
        start, taken = self._starts[best], min(wanted, self._lengths[best])
        if taken == self._lengths[best]:
            del self._starts[best], self._lengths[best]
        else:
            self._starts[best] += taken
            self._lengths[best] -= taken
        return range(start, start + taken)

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
