"""Asking every service for its figures, all at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import DistServeError
from distserve.messages import ReportReply, ReportRequest, WorkerInfo, decode_as, encode

ANSWER_S = 1.0  # for each; they are asked at the same time
SLICE_LINES = 1000  # of an exposition, at once on the event loop: half a millisecond

ROLES = ("gateway", "prefill", "decode", "kvstore")  # as a request meets them

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a service of the registry said, or why it said nothing. `at`: time.monotonic() of its answer."""

    info: WorkerInfo
    at: float
    report: ReportReply | None = None
    error: str = ""


async def gather(
    bus: Bus, services: Iterable[WorkerInfo], own_id: str, own_report: Callable[[], ReportReply]
) -> list[Told]:
    """One for each service, by role and name. `own_report` stands for the gateway of own_id, which needs no bus."""

    async def ask(info: WorkerInfo) -> Told:
        try:
            if info.role == "gateway" and info.worker_id == own_id:
                return Told(info=info, at=time.monotonic(), report=own_report())
            data = await bus.request(
                subjects.worker(info.role, info.worker_id), encode(ReportRequest()), timeout_s=ANSWER_S
            )
            return Told(info=info, at=time.monotonic(), report=decode_as(ReportReply, data))
        except DistServeError as e:
            return Told(info=info, at=time.monotonic(), error=e.message)

    ordered = sorted(services, key=lambda info: (ROLES.index(info.role), info.worker_id))
    return list(await asyncio.gather(*map(ask, ordered)))


async def in_slices(text: bytes, take: Callable[[list[str]], None]) -> None:
    """Give the lines of a text away, and let tokens pass between the slices. (On a thread it would hold up the event
    loop longer: that waits 5 ms for the interpreter each time it wakes.)"""
    lines = text.decode("utf-8", "replace").split("\n")
    for at in range(0, len(lines), SLICE_LINES):
        take(lines[at : at + SLICE_LINES])
        await asyncio.sleep(0)


class Shared(Generic[T]):
    """What is made on demand, once for all who ask within `age_s` of its beginning. Belongs to an event loop."""

    def __init__(self, make: Callable[[], Awaitable[T]], age_s: float) -> None:
        self._make = make
        self._age_s = age_s
        self._task: asyncio.Task[T] | None = None
        self._began = 0.0

    async def get(self) -> T:
        """Whoever stops waiting takes it from nobody else. An error goes to all who waited, and the next asks anew."""
        task = self._task
        if task is None or (task.done() and (self._failed(task) or time.monotonic() - self._began >= self._age_s)):
            self._began = time.monotonic()
            task = self._task = asyncio.create_task(self._run(), name="figures")
            task.add_done_callback(self._failed)  # an error is seen, also when nobody waits any more
        return await asyncio.shield(task)

    async def _run(self) -> T:
        return await self._make()

    @staticmethod
    def _failed(task: asyncio.Task[T]) -> bool:
        return task.cancelled() or task.exception() is not None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
