"""What our pool holds, told to whoever routes requests, as it changes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from itertools import islice

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import BusError
from distserve.kv.block_pool import BlockPool
from distserve.messages import EVENT_HASH_BYTES, KVEvents, KVSnapshot, KVSnapshotRequest, encode
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.snapshots import Snapshots

log = logging.getLogger(__name__)

GATHER_S = 0.005  # changes of so long go in one message
MAX_BYTES = 60 * 1024  # of hashes in one message


class EventPublisher:
    """The pool's on_stored and on_removed are this one's. A message that the bus does not take leaves a gap in the
    serials: whoever listens then asks for a snapshot."""

    def __init__(self, bus: Bus, pool: BlockPool, counts: StoreCounts, *, worker_id: str) -> None:
        self._bus = bus
        self._pool = pool
        self._counts = counts
        self._worker_id = worker_id
        self._max_bytes = min(MAX_BYTES, bus.max_payload_bytes // 2) // EVENT_HASH_BYTES * EVENT_HASH_BYTES
        self._changes: dict[bytes, bool] = {}  # beginning of a hash -> it is here; not told yet
        self._changed = asyncio.Event()
        self._serial = 0
        self._snapshots = Snapshots(lambda: b"".join(name[:EVENT_HASH_BYTES] for name in pool.names))
        pool.on_stored = self._stored
        pool.on_removed = self._removed

    async def run(self) -> None:
        """Endless."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(GATHER_S)
            await self.flush()

    async def flush(self) -> None:
        """Tell what has changed so far."""
        self._changed.clear()
        self._snapshots.drop_old(time.monotonic())
        while self._changes:
            stored, removed = self._batch()
            self._serial += 1
            self._counts.num_event_messages += 1
            events = KVEvents(worker=self._worker_id, serial=self._serial, stored=stored, removed=removed)
            try:
                await self._bus.publish(subjects.kv_events(), encode(events))
            except BusError as e:
                log.info("block events %d not sent: %s", self._serial, e)

    def snapshot(self, request: KVSnapshotRequest) -> KVSnapshot:
        """One page of all that is here, at most MAX_BYTES of it."""
        serial, packed = self._snapshots.of(request.serial, self._serial, time.monotonic())
        start = request.offset * EVENT_HASH_BYTES
        return KVSnapshot(
            worker=self._worker_id,
            serial=serial,
            total=len(packed) // EVENT_HASH_BYTES,
            stored=packed[start : start + self._max_bytes],
        )

    def close(self) -> None:
        """The pool has nobody to tell any more."""
        self._pool.on_stored = self._pool.on_removed = lambda names: None

    def _stored(self, names: Iterable[bytes]) -> None:
        self._note(names, True)

    def _removed(self, names: Iterable[bytes]) -> None:
        self._note(names, False)

    def _note(self, names: Iterable[bytes], here: bool) -> None:
        for name in names:
            self._changes[name[:EVENT_HASH_BYTES]] = here
        self._changed.set()

    def _batch(self) -> tuple[bytes, bytes]:
        """The next changes, each hash once."""
        stored: list[bytes] = []
        removed: list[bytes] = []
        for name in list(islice(self._changes, self._max_bytes // EVENT_HASH_BYTES)):
            (stored if self._changes.pop(name) else removed).append(name)
        return b"".join(stored), b"".join(removed)
