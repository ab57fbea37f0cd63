"""Which blocks of a KV pool are free. Plain arithmetic: the bytes live elsewhere (engine/paged_cache.py)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from distserve.errors import KVError, PoolExhausted

FIRST_BLOCK = 1  # block 0 takes the writes of padding and is never allocated


class BlockPool:
    """Block ids 1 … num_blocks-1, each with one owner from allocate() to free().

    Not thread-safe: one loop owns it. Free ids are kept as maximal runs, sorted by start, so that an allocation is
    contiguous where it can be and a transfer of it is one copy instead of many:

        starts   [1,        40, ...]
        lengths  [12,        3, ...]     a run is [start, start + length); neighbours never touch
    """

    def __init__(self, num_blocks: int) -> None:
        """A pool of `num_blocks` blocks, the padding block included. Raises KVError if nothing would be usable."""
        if num_blocks < 2:
            raise KVError(
                f"num_blocks is {num_blocks}, must be at least 2: block 0 is for padding",
                num_blocks=num_blocks,
                expected=">=2",
            )
        self._num_blocks = num_blocks
        self._starts = [FIRST_BLOCK]
        self._lengths = [num_blocks - FIRST_BLOCK]
        self._num_free = num_blocks - FIRST_BLOCK
        self._used = bytearray(num_blocks)  # 1: allocated

    @property
    def num_total(self) -> int:
        """Usable blocks: all but block 0."""
        return self._num_blocks - FIRST_BLOCK

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks without an owner whose content may be found again. None are kept yet."""
        return 0

    @property
    def num_used(self) -> int:
        return self._used.count(1)

    def allocate(self, n: int) -> list[int]:
        """`n` blocks, or PoolExhausted (fields wanted, free, total) and nothing changes.

        Best fit: the shortest free run that holds all of them; failing that the longest runs, until there are enough.
        """
        if n < 0:
            raise KVError(f"allocate({n}): the number of blocks must not be negative", wanted=n, expected=">=0")
        if n > self._num_free:
            raise PoolExhausted(
                f"{n} KV blocks wanted, {self._num_free} of {self.num_total} are free",
                wanted=n,
                free=self._num_free,
                total=self.num_total,
            )
        ids: list[int] = []
        while len(ids) < n:
            ids.extend(self._take(n - len(ids)))
        for block_id in ids:
            self._used[block_id] = 1
        self._num_free -= n
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back. A block that is not allocated, or named twice, is a programming error: KVError, and
        nothing changes."""
        returned = sorted(ids)
        for position, block_id in enumerate(returned):
            if not FIRST_BLOCK <= block_id < self._num_blocks:
                raise KVError(
                    f"block {block_id} is not of this pool, whose blocks are {FIRST_BLOCK}..{self._num_blocks - 1}",
                    block_id=block_id,
                )
            if not self._used[block_id] or (position and returned[position - 1] == block_id):
                raise KVError(f"block {block_id} is freed twice", block_id=block_id)
        start = 0
        for stop in range(1, len(returned) + 1):
            if stop == len(returned) or returned[stop] != returned[stop - 1] + 1:
                self._give(returned[start], stop - start)
                start = stop
        for block_id in returned:
            self._used[block_id] = 0
        self._num_free += len(returned)

    def check(self) -> None:
        """Raises KVError if free + cached + used == total does not hold or the runs are inconsistent."""
        covered = bytearray(self._used)
        for start, length in zip(self._starts, self._lengths, strict=True):
            if length < 1 or 1 in covered[start : start + length]:
                raise KVError(f"free run [{start}, {start + length}) is empty or overlaps used blocks", block_id=start)
            covered[start : start + length] = b"\x01" * length
        free, cached, used = sum(self._lengths), self.num_cached, self.num_used
        if free != self._num_free or free + cached + used != self.num_total or self._used[0]:
            raise KVError(
                f"free {free} (counted {self._num_free}) + cached {cached} + used {used} is not total {self.num_total}",
                free=free,
                cached=cached,
                used=used,
                total=self.num_total,
            )

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
