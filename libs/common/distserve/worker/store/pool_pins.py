"""Blocks of our pool that others have found and may come for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distserve.kv.block_pool import BlockPool

MAX_PIN_S = 60.0  # an asker that wants longer asks again
MAX_SHARE = 2  # 1/2 of the pool may be pinned: the rest is the worker's own


@dataclass(slots=True)
class _Pin:
    asker: str
    block_ids: list[int]
    timer: asyncio.TimerHandle


class PoolPins:
    """A pin is one more reference to each of its blocks. It ends when it is released, or over, or its asker is gone."""

    def __init__(self, pool: BlockPool, on_freed: Callable[[], None]) -> None:
        """on_freed: blocks came back to the pool."""
        self._pool = pool
        self._on_freed = on_freed
        self._pins: dict[int, _Pin] = {}
        self._times: Counter[int] = Counter()  # block -> pins that it is under
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Blocks under pins."""
        return len(self._times)

    def may_pin(self, found: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Of several runs of blocks as much as the pool can spare, from the first block on."""
        room = self._pool.num_total // MAX_SHARE - len(self._times)
        ours: list[Sequence[int]] = []
        fresh: set[int] = set()
        for ids in found:
            num = 0
            for block_id in ids:
                if block_id not in self._times and block_id not in fresh:
                    if len(fresh) >= room:
                        break
                    fresh.add(block_id)
                num += 1
            ours.append(ids[:num])
        return ours

    def pin(self, asker: str, block_ids: Sequence[int], ttl_s: float) -> int:
        """An id for release(); 0 for no blocks."""
        if not block_ids:
            return 0
        ids = list(dict.fromkeys(block_ids))  # in order; the pool takes each once
        self._pool.acquire(ids)
        pin_id = self._next_id
        self._next_id += 1
        timer = asyncio.get_running_loop().call_later(min(ttl_s, MAX_PIN_S), self._end, pin_id)
        self._pins[pin_id] = _Pin(asker, ids, timer)
        self._times.update(ids)
        return pin_id

    def release(self, asker: str, pin_id: int) -> None:
        """Of one that the asker does not hold (any more) nothing is heard."""
        if (pin := self._pins.get(pin_id)) is not None and pin.asker == asker:
            self._end(pin_id)

    def asker_gone(self, asker: str) -> None:
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.asker == asker]:
            self._end(pin_id)

    def close(self) -> None:
        for pin_id in list(self._pins):
            self._end(pin_id)

    def _end(self, pin_id: int) -> None:
        pin = self._pins.pop(pin_id)
        pin.timer.cancel()
        self._times.subtract(pin.block_ids)
        for block_id in pin.block_ids:
            if not self._times[block_id]:
                del self._times[block_id]
        self._pool.free(pin.block_ids)
        self._on_freed()
