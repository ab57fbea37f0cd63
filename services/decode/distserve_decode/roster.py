"""The sequences that are here, whatever stage they are at: by their keys, and as the engine knows them."""

import asyncio
from collections.abc import Iterator

from distserve.engine.sequence import Sequence
from distserve.messages import SequenceKey
from distserve_decode.live import Live


class Roster:
    def __init__(self) -> None:
        self._by_key: dict[SequenceKey, Live] = {}
        self._by_sequence: dict[Sequence, Live] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Live]:
        """All that are here now: who goes through them may remove some."""
        return iter(list(self._by_key.values()))

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._by_key

    def get(self, key: SequenceKey) -> Live | None:
        return self._by_key.get(key)

    def of(self, sequence: Sequence) -> Live:
        return self._by_sequence[sequence]

    def find(self, sequence: Sequence) -> Live | None:
        return self._by_sequence.get(sequence)

    def add(self, live: Live) -> None:
        self._by_key[live.key] = self._by_sequence[live.sequence] = live
        self._empty.clear()

    def remove(self, live: Live) -> None:
        del self._by_key[live.key], self._by_sequence[live.sequence]
        if not self._by_key:
            self._empty.set()

    async def emptied(self) -> None:
        """Returns when nothing is here."""
        await self._empty.wait()
