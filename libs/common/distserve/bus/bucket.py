"""What the registry lies in: a store of small entries that forgets each one ttl_s after its last put.

Every bus has its own (`jetstream.py`, `memory.py`). What the registry promises beyond that is in registry.py and
watch.py, once for all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from distserve.bus.base import BusStats, Subscription

ChangeKind = Literal["put", "left", "expired"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key as the bucket has it. `value` is None if it was deleted on purpose. A revision grows with every put,
    and starts again in a bucket that was made anew."""

    revision: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a bucket, as it happened."""

    key: str
    kind: ChangeKind
    entry: Entry


class Bucket(ABC):
    """Keys to bytes. Raises only BusError and its kinds; every wait has a deadline."""

    ttl_s: float
    stats: BusStats

    @property
    @abstractmethod
    def connected_since(self) -> float | None:
        """When the present connection began (time.monotonic()); None while cut off."""

    @abstractmethod
    async def open(self) -> None:
        """Make the bucket if there is none. Raises BusError if one with another TTL exists."""

    @abstractmethod
    async def put(self, key: str, value: bytes) -> None:
        """Create or renew a key; makes a bucket that is gone anew."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Followers see "left"."""

    @abstractmethod
    async def entries(self, timeout_s: float) -> Mapping[str, Entry]:
        """Everything there is, and what was deleted within the last ttl_s. A bucket that is gone is empty."""

    @abstractmethod
    async def follow(self, callback: Callable[[Change], None]) -> Subscription:
        """Call it for every change from when this returns, in order. Changes during a cut are not made up for."""
