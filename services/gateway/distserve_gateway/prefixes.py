"""How much of a prompt each worker seems to hold."""

import asyncio
import functools
from collections.abc import Collection, Mapping

from distserve.kv.hashing import Chain
from distserve.kv.layout import fingerprint
from distserve.messages import EVENT_HASH_BYTES, KVLayout
from distserve_gateway.held_blocks import words
from distserve_gateway.kv_index import KVIndex
from distserve_gateway.workers import Workers

SLICE_BLOCKS = 64  # hashed at once, about 0.1 ms; between slices the event loop serves streams

_fingerprint = functools.lru_cache(maxsize=64)(fingerprint)


class Prefixes:
    """A prompt is hashed as far as any worker follows: one that nobody holds costs its first slice."""

    def __init__(self, index: KVIndex, workers: Workers) -> None:
        self._index = index
        self._workers = workers

    def __bool__(self) -> bool:
        """Whether any worker holds anything."""
        return self._index.num_hints > 0

    async def held(self, token_ids: list[int], cache_salt: str) -> dict[str, int]:
        """Worker -> leading tokens that it seems to hold, in whole blocks, at least one left to compute. Workers that
        hold nothing of it are absent."""
        found: dict[str, int] = {}
        for layout, holders in self._by_layout().items():
            if layout.block_size < len(token_ids):
                found |= await _follow(token_ids, layout, cache_salt, holders)
        return found

    def _by_layout(self) -> dict[KVLayout, dict[str, Mapping[int, None]]]:
        snapshot = self._workers.snapshot
        by_layout: dict[KVLayout, dict[str, Mapping[int, None]]] = {}
        for worker_id, blocks in self._index.holders.items():
            info = snapshot.get(worker_id)
            if info is not None and info.layout is not None:
                by_layout.setdefault(info.layout, {})[worker_id] = blocks
        return by_layout


async def _follow(
    token_ids: list[int], layout: KVLayout, cache_salt: str, holders: Mapping[str, Mapping[int, None]]
) -> dict[str, int]:
    """Slice by slice, until no worker holds a whole one."""
    block_size = layout.block_size
    num_blocks = (len(token_ids) - 1) // block_size
    chain = Chain(block_size, _fingerprint(layout), cache_salt)
    found: dict[str, int] = {}
    following = dict(holders)
    for start in range(0, num_blocks, SLICE_BLOCKS):
        if start:
            await asyncio.sleep(0)
        stop = min(start + SLICE_BLOCKS, num_blocks)
        chain.extend(token_ids[: stop * block_size])
        numbers = words(b"".join([name[:EVENT_HASH_BYTES] for name in chain.hashes[start:stop]]))
        for worker_id, blocks in list(following.items()):
            num_held = _num_held(numbers, blocks)
            if start + num_held:
                found[worker_id] = (start + num_held) * block_size
            if num_held < len(numbers):
                del following[worker_id]
        if not following:
            break
    return found


def _num_held(numbers: Collection[int], blocks: Mapping[int, None]) -> int:
    """How many of the first of them are there, unbroken."""
    if all(map(blocks.__contains__, numbers)):  # without a step of Python for each: nearly all that a hit costs
        return len(numbers)
    for i, number in enumerate(numbers):
        if number not in blocks:
            return i
    return len(numbers)
