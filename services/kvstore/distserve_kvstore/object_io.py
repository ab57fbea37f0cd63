"""The object tier as the node uses it: objects by number, whole runs in, single blocks out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from distserve.errors import BlocksMissing, DistServeError, ObjectStoreDown
from distserve_kvstore.objects import ObjectRun, ObjectTier
from distserve_kvstore.promotion import Wanted
from distserve_kvstore.tier_state import TierState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Object:
    name: str
    start: int  # depth of its first block


class ObjectIo:
    """Belongs to the event loop. The index names an object by a number, given here."""

    def __init__(self, tier: ObjectTier, state: TierState) -> None:
        self.tier = tier
        self._state = state
        self._objects: dict[int, _Object] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._to_delete: set[str] = set()

    def number_of(self, name: str, start: int) -> int:
        """Of an object, known or new."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._next
            self._objects[number] = _Object(name, start)
            self._next += 1
        return number

    async def put(self, run: ObjectRun) -> int:
        """The object's number. Raises ObjectStoreDown, KVError."""
        with self._state.operation("write"):
            name = await self.tier.put(run)
        self._state.num_written += len(run.hashes)
        self._to_delete.discard(name)
        return self.number_of(name, run.start)

    async def read(self, blocks: Sequence[Wanted], into: Sequence[memoryview]) -> list[DistServeError | None]:
        """Neighbours of one object in one call, all calls at once. Raises ObjectStoreDown if none of them worked."""
        stretches = list(_stretches(blocks))
        with self._state.operation("read"):
            found = await asyncio.gather(*(self._get(blocks[a:b], into[a:b]) for a, b in stretches))
            errors = [e for part in found for e in part]
            down = next((e for e in errors if isinstance(e, ObjectStoreDown)), None)
            if down is not None and all(isinstance(e, ObjectStoreDown) for e in errors):
                raise down
        self._state.num_errors += sum(e is not None for e in errors)
        return errors

    async def _get(self, blocks: Sequence[Wanted], into: Sequence[memoryview]) -> list[DistServeError | None]:
        if (one := self._objects.get(blocks[0].place)) is None:
            return [BlocksMissing("its object was deleted meanwhile", num_present=0, tier="object")] * len(blocks)
        try:
            return await self.tier.get(one.name, [b.hash for b in blocks], blocks[0].depth - one.start, into)
        except DistServeError as e:
            return [e] * len(blocks)

    @property
    def num_to_delete(self) -> int:
        """Objects that are not deleted for good yet."""
        return len(self._to_delete)

    async def delete(self, numbers: Sequence[int]) -> None:
        """For good when it returns. Raises ObjectStoreDown: then it is tried again by retry(), until it works."""
        names = [self._objects[n].name for n in numbers if n in self._objects]
        self.delete_soon(numbers)
        if names:
            await self.tier.delete(names)
            self._to_delete.difference_update(names)

    def delete_soon(self, numbers: Sequence[int]) -> None:
        """By retry()."""
        for n in numbers:
            if (one := self._objects.pop(n, None)) is not None:
                del self._numbers[one.name]
                self._to_delete.add(one.name)

    async def retry(self) -> None:
        """What could not be deleted, once more. Never raises."""
        if not self._to_delete or self._state.trouble("write"):
            return
        names = list(self._to_delete)
        try:
            with self._state.operation("write"):
                await self.tier.delete(names)
            self._to_delete.difference_update(names)
        except DistServeError as e:
            log.debug("objects still to be deleted: %s", e)

    async def close(self) -> None:
        await self.tier.close()


def _stretches(blocks: Sequence[Wanted]) -> list[tuple[int, int]]:
    """[start, stop) of blocks that are neighbours in one object."""
    found, first = [], 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or (blocks[i].place, blocks[i].depth) != (blocks[i - 1].place, blocks[i - 1].depth + 1):
            found.append((first, i))
            first = i
    return found
