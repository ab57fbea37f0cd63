"""The memory bus's bucket: entries in a dict, each with a timer that forgets it."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from distserve.bus.base import Subscription
from distserve.bus.bucket import Bucket, Change, Entry

if TYPE_CHECKING:
    from distserve.bus.memory import MemoryBus


class MemoryStore:
    """The one bucket of a hub. A deleted key stays, marked, for one TTL, as it does in NATS."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._revision = 0
        self.followers: list[Callable[[Change], None]] = []

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def write(self, key: str, value: bytes | None, ttl_s: float) -> None:
        self._revision += 1
        entry = self._entries[key] = Entry(self._revision, value)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(ttl_s, self._expire, key)
        self._tell(Change(key, "left" if value is None else "put", entry))

    def clear(self) -> None:
        """Forget everything without a word to anybody."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._entries.clear()
        self._revision = 0

    def _expire(self, key: str) -> None:
        del self._timers[key]
        self._revision += 1
        if self._entries.pop(key).value is not None:
            self._tell(Change(key, "expired", Entry(self._revision, None)))

    def _tell(self, change: Change) -> None:
        for follower in list(self.followers):
            follower(change)


class MemoryBucket(Bucket):
    """A bus's view of the store."""

    def __init__(self, bus: "MemoryBus", store: MemoryStore, ttl_s: float) -> None:
        self._bus = bus
        self._store = store
        self.ttl_s = ttl_s
        self.stats = bus.stats

    @property
    def connected_since(self) -> float | None:
        return self._bus.connected_since

    async def open(self) -> None:
        await self._bus.online.wait("the registry", self.ttl_s)

    async def put(self, key: str, value: bytes) -> None:
        await self._bus.online.wait("the registry", self.ttl_s)
        self._store.write(key, value, self.ttl_s)

    async def delete(self, key: str) -> None:
        await self._bus.online.wait("the registry", self.ttl_s)
        self._store.write(key, None, self.ttl_s)

    async def entries(self, timeout_s: float) -> Mapping[str, Entry]:
        await self._bus.online.wait("the registry", timeout_s)
        return dict(self._store.entries)

    async def follow(self, callback: Callable[[Change], None]) -> Subscription:
        return _Following(self._bus, self._store, callback)


class _Following(Subscription):
    def __init__(self, bus: "MemoryBus", store: MemoryStore, callback: Callable[[Change], None]) -> None:
        self._bus = bus
        self._store = store
        self._callback = callback
        store.followers.append(self._tell)

    def _tell(self, change: Change) -> None:
        if self._bus.connected:
            self._callback(change)

    async def close(self) -> None:
        if self._tell in self._store.followers:
            self._store.followers.remove(self._tell)
