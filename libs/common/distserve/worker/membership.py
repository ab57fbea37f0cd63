"""A service's entry in the registry: put at once, renewed by a heartbeat, deleted when it leaves on purpose."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from distserve.bus.base import Registry
from distserve.errors import BusError
from distserve.messages import WorkerInfo

log = logging.getLogger(__name__)


class Membership:
    """`describe` gives the entry as it is now (its load changes from beat to beat). It must not block."""

    def __init__(self, registry: Registry, describe: Callable[[], WorkerInfo], *, beat_s: float) -> None:
        self._registry = registry
        self._describe = describe
        self._beat_s = beat_s
        self._num_beats = 0
        self._leaving = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def beat(self) -> None:
        """Renew now, for instance because the status changed. A cut-off bus is tried again by the next beat."""
        self._num_beats += 1
        info = msgspec.structs.replace(self._describe(), beat=self._num_beats)
        try:
            async with asyncio.timeout(max(1.0, self._beat_s)):
                await self._registry.put(info)
        except (BusError, TimeoutError) as e:
            log.warning("heartbeat %d not taken: %s", self._num_beats, e or "no answer in time")
        except Exception:  # a worker that lives must not vanish because one beat failed
            log.exception("heartbeat %d failed", self._num_beats)

    async def _run(self) -> None:
        while not self._leaving.is_set():
            try:
                async with asyncio.timeout(self._beat_s):
                    await self._leaving.wait()
            except TimeoutError:
                await self.beat()

    async def __aenter__(self) -> Self:
        info = msgspec.structs.replace(self._describe(), beat=0)
        await self._registry.put(info)
        self._task = asyncio.create_task(self._run(), name="heartbeat")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._task is not None
        # Told, not only cancelled: a library below may swallow a cancel (asyncio.wait_for before Python 3.12 does).
        self._leaving.set()
        await asyncio.wait({self._task}, timeout=max(1.0, self._beat_s))
        self._task.cancel()
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(2.0):
                await self._registry.delete(self._describe())
