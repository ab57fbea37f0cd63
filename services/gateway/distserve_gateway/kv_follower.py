"""Keeps a KVIndex up to date: follows the registry and the block events, and asks workers for snapshots."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from distserve.bus import subjects
from distserve.bus.base import Bus, Delivery, RegistryEvent, Watch
from distserve.errors import DistServeError, MalformedMessage, VersionMismatch
from distserve.messages import (
    EVENT_HASH_BYTES,
    KVEvents,
    KVSnapshot,
    KVSnapshotRequest,
    Role,
    WorkerInfo,
    decode_as,
    encode,
)
from distserve_gateway.held_blocks import HeldBlocks
from distserve_gateway.kv_index import KVIndex

log = logging.getLogger(__name__)

PAGE_TIMEOUT_S = 2.0
MAX_ASKED = 4  # workers asked at a time: a gateway that starts must not flood itself
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
LOOK_S = 5.0  # how often it looks whether a worker that was left out has room again


@dataclass(slots=True)
class _Life:
    """A worker's process as the registry tells of it: an id from the configuration may have several in turn."""

    role: Role
    pid: int
    beat: int
    asking: "asyncio.Task[None] | None" = None
    mute: bool = False  # knows no snapshots; an event shows that it does

    def goes_on(self, info: WorkerInfo) -> bool:
        return info.pid == self.pid and info.beat >= self.beat


class KVFollower:
    """`async with` it. Belongs to the event loop; `num_snapshots` counts those that were taken over."""

    def __init__(self, bus: Bus, watch: Watch, model: str, index: KVIndex) -> None:
        self.index = index
        self.num_snapshots = 0
        self._bus = bus
        self._watch = watch
        self._model = model
        self._lives: dict[str, _Life] = {}
        self._turns = asyncio.Semaphore(MAX_ASKED)
        self._stack = AsyncExitStack()
        self._closed = False

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop_asking)
            # Events first: a snapshot taken before they are followed could miss one for ever.
            subject = subjects.kv_events()
            await stack.enter_async_context(await self._bus.subscribe(subject, self._on_events, inline=True))
            self._watch.on_event(self._on_registry)
            for info in self._watch.snapshot.values():
                self._seen(info)
            looking = asyncio.create_task(self._look(), name="kv index")
            stack.callback(looking.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _stop_asking(self) -> None:
        self._closed = True
        tasks = [life.asking for life in self._lives.values() if life.asking is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ what comes

    def _on_registry(self, event: RegistryEvent) -> None:
        if event.info is not None:
            self._seen(event.info)
        else:
            self._gone(event.worker_id)

    def _seen(self, info: WorkerInfo) -> None:
        if self._closed or info.role not in ("prefill", "decode") or info.model != self._model:
            return
        life = self._lives.get(info.worker_id)
        if life is not None and life.goes_on(info):
            life.beat = info.beat
            return
        self._gone(info.worker_id)
        self._lives[info.worker_id] = _Life(info.role, info.pid, info.beat)
        self.index.join(info.worker_id)
        self._ask_soon(info.worker_id)

    def _gone(self, worker_id: str) -> None:
        life = self._lives.pop(worker_id, None)
        if life is not None and life.asking is not None:
            life.asking.cancel()
        self.index.leave(worker_id)

    async def _on_events(self, delivery: Delivery) -> None:
        try:
            events = decode_as(KVEvents, delivery.data)
            life = self._lives.get(events.worker)
            if life is None:
                return
            life.mute = False
            self.index.note(events)
        except DistServeError as e:
            log.error("dropped a message on %s: %s", delivery.subject, e)
            return
        if life.asking is None:
            self._ask_soon(events.worker)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for worker_id in self.index.readmit():
                self._ask_soon(worker_id)

    # ------------------------------------------------------------ asking

    def _ask_soon(self, worker_id: str) -> None:
        """Unless nothing is missing, or it is being asked already."""
        life = self._lives.get(worker_id)
        held = self.index.lacks(worker_id)
        if life is None or held is None or life.mute or life.asking is not None or self._closed:
            return
        life.asking = asyncio.create_task(self._ask(worker_id, life), name=f"blocks of {worker_id}")
        life.asking.add_done_callback(lambda _: self._asked(worker_id, life))

    def _asked(self, worker_id: str, life: _Life) -> None:
        life.asking = None
        if self._lives.get(worker_id) is life:
            self._ask_soon(worker_id)  # an event may have come, or gone missing, after the last look

    async def _ask(self, worker_id: str, life: _Life) -> None:
        """Until nothing is missing, with a growing pause after what was of no use: a failure, or a snapshot that told
        nothing new. Cancelled when the worker goes."""
        pause_s = FIRST_PAUSE_S
        while (held := self.index.lacks(worker_id)) is not None and not life.mute:
            before = held.serial
            try:
                async with self._turns:
                    pages = await self._snapshot(worker_id, life.role, held)
                if pages and self.index.restore(worker_id, held, pages):
                    self.num_snapshots += 1
                    if held.serial != before:
                        continue
            except (MalformedMessage, VersionMismatch) as e:
                life.mute = True
                log.info("%s %s does not tell what it holds: %s", life.role, worker_id, e)
                return
            except DistServeError as e:
                log.info("could not ask %s %s what it holds: %s", life.role, worker_id, e)
            except Exception:  # hints are not worth a task that is gone for good
                log.exception("asking %s %s what it holds failed", life.role, worker_id)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _snapshot(self, worker_id: str, role: Role, held: HeldBlocks) -> list[KVSnapshot]:
        """Its pages, all of one moment; none if the worker keeps that moment no more, or there is no room for it."""
        early = held.early
        pages = [await self._page(worker_id, role, KVSnapshotRequest())]
        serial, total = pages[0].serial, pages[0].total
        if not self.index.fits(worker_id, total):
            return []
        held.forget_unreached(early, serial)
        while (num_held := sum(len(page.stored) for page in pages) // EVENT_HASH_BYTES) < total:
            page = await self._page(worker_id, role, KVSnapshotRequest(offset=num_held, serial=serial))
            if page.serial != serial or not page.stored:
                return []
            pages.append(page)
        return pages

    async def _page(self, worker_id: str, role: Role, request: KVSnapshotRequest) -> KVSnapshot:
        reply = await self._bus.request(subjects.worker(role, worker_id), encode(request), timeout_s=PAGE_TIMEOUT_S)
        return decode_as(KVSnapshot, reply)
