"""A live copy of the registry, and the rules by which an entry leaves it.

An entry leaves the snapshot when it was deleted on purpose, at once; or when it has expired. An expiry is believed
only if this side has been in unbroken contact for a full TTL: after a cut every worker gets that time to be heard
again, since it may have been cut off as well. There are two ways to learn of one, and either is enough:

- the bucket says so (a change of kind "expired");
- the entry was silent for a TTL, and the bucket, asked again, has it no more. This covers changes lost on the way, a
  bucket that was made anew, and expiries that were not believed when they came. A bucket that still holds an entry
  which nobody renewed in two TTLs (it was made with a longer one) doesn't keep it alive.

An answer that takes longer than half a TTL, or none, counts as a cut.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from distserve.bus.base import RegistryEvent, Subscription, Watch
from distserve.bus.bucket import Bucket, Change, ChangeKind, Entry
from distserve.bus.exchange import timed_out
from distserve.errors import BusError, MalformedMessage, VersionMismatch
from distserve.messages import WorkerInfo, decode_as

Condition = Callable[[Mapping[str, WorkerInfo]], bool]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    info: WorkerInfo
    revision: int
    heard_at: float  # time.monotonic() of this side


class LiveWatch(Watch):
    """Watch over a Bucket. Belongs to one event loop; entered once."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._known: dict[str, _Known] = {}  # by worker_id
        self._snapshot: Mapping[str, WorkerInfo] | None = None  # made on demand
        self._callbacks: list[Callable[[RegistryEvent], None]] = []
        self._waiting: dict[asyncio.Future[None], Condition] = {}
        self._in_contact_since = 0.0
        self._changed: set[str] = set()  # keys that changed while the bucket was being listed
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def snapshot(self) -> Mapping[str, WorkerInfo]:
        """A copy that later changes don't touch."""
        if self._snapshot is None:
            self._snapshot = MappingProxyType({worker_id: known.info for worker_id, known in self._known.items()})
        return self._snapshot

    def on_event(self, callback: Callable[[RegistryEvent], None]) -> None:
        self._callbacks.append(callback)

    async def wait_for(self, condition: Condition, timeout_s: float) -> None:
        if condition(self.snapshot):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = condition
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            raise timed_out("the registry", timeout_s, "not what was waited for") from None
        finally:
            self._waiting.pop(future, None)

    async def __aenter__(self) -> Self:
        await self._bucket.open()
        self._subscription = await self._bucket.follow(self._on_change)
        try:
            await self._merge()
        except BaseException:
            await self._subscription.close()
            raise
        self._in_contact_since = time.monotonic()
        self._task = asyncio.create_task(self._guard())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._subscription is not None:
            with contextlib.suppress(BusError):
                await self._subscription.close()

    # ------------------------------------------------------------ changes as they come

    def _on_change(self, change: Change) -> None:
        self._changed.add(change.key)
        if change.kind == "expired" and not self._in_contact(time.monotonic()):
            return
        self._apply(change.key, change.entry, change.kind)

    def _apply(self, key: str, entry: Entry, kind: ChangeKind) -> None:
        worker_id = key.partition(".")[2]
        if kind != "put" or entry.value is None:
            if self._known.pop(worker_id, None) is not None:
                self._emit(RegistryEvent("gone", worker_id, None, "left" if kind == "left" else "expired"))
            return
        try:
            info = decode_as(WorkerInfo, entry.value)
        except (VersionMismatch, MalformedMessage) as e:
            self._bucket.stats.undecodable_entries += 1
            _log.warning("left out the registry's entry %s: %s", key, e)
            return
        self._known[worker_id] = _Known(info, entry.revision, time.monotonic())
        self._emit(RegistryEvent("put", worker_id, info))

    def _emit(self, event: RegistryEvent) -> None:
        self._snapshot = None
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception:
                _log.exception("a registry callback failed on %s of %s", event.kind, event.worker_id)
        for future, condition in list(self._waiting.items()):
            if future.done():
                continue
            try:
                if condition(self.snapshot):
                    future.set_result(None)
            except Exception as e:
                future.set_exception(e)

    # ------------------------------------------------------------ what no change tells

    def _in_contact(self, now: float) -> bool:
        """Whether contact has been unbroken for a full TTL, so that an expiry can be believed."""
        since = self._bucket.connected_since
        return since is not None and now - max(since, self._in_contact_since) >= self._bucket.ttl_s

    async def _guard(self) -> None:
        ttl_s = self._bucket.ttl_s
        while True:
            await asyncio.sleep(ttl_s / 8)
            try:
                await self._check(time.monotonic())
            except BusError as e:
                self._in_contact_since = time.monotonic()
                _log.info("the registry can't be read, its snapshot stays as it is: %s", e)
            except Exception:
                _log.exception("checking the registry failed")

    async def _check(self, now: float) -> None:
        since = self._bucket.connected_since
        if since is None:
            return
        if since > self._in_contact_since:  # back from a cut: whoever is there or left meanwhile is known at once
            await self._merge()
            self._in_contact_since = max(since, self._in_contact_since)
            return
        if not self._in_contact(now):
            return
        ttl_s = self._bucket.ttl_s
        silent = [worker_id for worker_id, known in self._known.items() if now - known.heard_at >= ttl_s]
        if not silent:
            return
        entries = await self._list()
        if time.monotonic() - now > ttl_s / 2:
            self._in_contact_since = time.monotonic()
            return
        by_worker = {key.partition(".")[2]: (key, entry) for key, entry in entries.items()}
        for worker_id in silent:
            known = self._known.get(worker_id)
            if known is None or known.heard_at > now:
                continue
            key, entry = by_worker.get(worker_id, (f".{worker_id}", None))
            if entry is None:
                self._apply(key, Entry(0, None), "expired")
            elif entry.value is None:
                self._apply(key, entry, "left")
            elif entry.revision != known.revision:
                self._apply(key, entry, "put")
            elif now - known.heard_at >= 2 * ttl_s:
                self._apply(key, entry, "expired")

    async def _merge(self) -> None:
        """Take over what the bucket holds. Entries that it lacks stay: only _check judges those."""
        for key, entry in (await self._list()).items():
            self._apply(key, entry, "left" if entry.value is None else "put")

    async def _list(self) -> dict[str, Entry]:
        """The bucket's entries, less those that changed while it was read: of those the change is newer."""
        self._changed.clear()
        entries = await self._bucket.entries(timeout_s=self._bucket.ttl_s)
        return {key: entry for key, entry in entries.items() if key not in self._changed}
