"""Which entries must stay where they are: for askers that have found them, and for bytes that are on their way."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distserve.errors import KVError
from distserve_kvstore.columns import Entries
from distserve_kvstore.index import BlockIndex

MAX_PIN_S = 60.0  # an asker that wants longer asks again


@dataclass(frozen=True, slots=True)
class Pin:
    pin_id: int
    asker: str
    entries: Entries
    expires_at: float


class Pins:
    """All pins of the index are made here. A *hold* is ours, for as long as bytes are
    read or written; a *pin* is an asker's: it ends when it is released, fetched by, or over, or its asker is gone.

    Times are seconds of one monotonic clock, passed in.
    """

    def __init__(self, index: BlockIndex, on_unpinned: Callable[[Entries], None] = lambda entries: None) -> None:
        """on_unpinned: these have no pin and no hold any more."""
        self._index = index
        self._on_unpinned = on_unpinned
        self._pins: dict[int, Pin] = {}
        self._by_expiry: list[tuple[float, int]] = []
        self._next_id = 1
        self._num_held = 0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_held(self) -> int:
        """Entries under holds, each counted as often as it is held."""
        return self._num_held

    def pin(self, asker: str, entries: Entries, ttl_s: float, now: float) -> int:
        """An id for release(); 0 for no entries."""
        if not len(entries):
            return 0
        pin = Pin(self._next_id, asker, entries, now + min(ttl_s, MAX_PIN_S))
        self._next_id += 1
        self._pins[pin.pin_id] = pin
        heapq.heappush(self._by_expiry, (pin.expires_at, pin.pin_id))
        self._add(entries)
        return pin.pin_id

    def release(self, asker: str, pin_id: int) -> bool:
        """False if the asker has no such pin (any more)."""
        pin = self._pins.get(pin_id)
        if pin is None or pin.asker != asker:
            return False
        del self._pins[pin_id]
        self._drop(pin.entries)
        return True

    def expire(self, now: float) -> int:
        """End those that are over; how many."""
        num = 0
        while self._by_expiry and self._by_expiry[0][0] <= now:
            _, pin_id = heapq.heappop(self._by_expiry)
            if (pin := self._pins.pop(pin_id, None)) is not None:
                self._drop(pin.entries)
                num += 1
        return num

    def asker_gone(self, asker: str) -> int:
        """End all of its pins; how many."""
        ended = [pin for pin in self._pins.values() if pin.asker == asker]
        for pin in ended:
            self.release(asker, pin.pin_id)
        return len(ended)

    def hold(self, entries: Entries) -> None:
        self._num_held += len(entries)
        self._add(entries)

    def unhold(self, entries: Entries) -> None:
        self._num_held -= len(entries)
        self._drop(entries)

    def close(self) -> None:
        """End every pin."""
        for pin in list(self._pins.values()):
            self.release(pin.asker, pin.pin_id)

    def check(self) -> None:
        """Raises KVError unless the column has as many pins as there are here."""
        ours = self._num_held + sum(len(pin.entries) for pin in self._pins.values())
        counted = int(self._index.num_pins[self._index.entries()].sum(dtype=np.int64))
        if counted != ours:
            raise KVError(f"{counted} pins in the index, {ours} on the books", counted=counted, expected=ours)

    def _add(self, entries: Entries) -> None:
        np.add.at(self._index.num_pins, entries, 1)  # one may be named twice

    def _drop(self, entries: Entries) -> None:
        np.subtract.at(self._index.num_pins, entries, 1)
        if len(over := entries[self._index.num_pins[entries] == 0]):
            self._index.watcher.released(over)
            self._on_unpinned(over)
