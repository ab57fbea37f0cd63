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
        self._task: asyncio.Task[None] | None = None

    async def beat(self) -> None:
        """Renew now, for instance because the status changed. A cut-off bus is tried again by the next beat."""
        self._num_beats += 1
        info = msgspec.structs.replace(self._describe(), beat=self._num_beats)
        try:
            await asyncio.wait_for(self._registry.put(info), timeout=max(1.0, self._beat_s))
        except (BusError, TimeoutError) as e:
            log.warning("heartbeat %d not taken: %s", self._num_beats, e or "no answer in time")
        except Exception:  # a worker that lives must not vanish because one beat failed
            log.exception("heartbeat %d failed", self._num_beats)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
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
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        with contextlib.suppress(BusError, TimeoutError):
            await asyncio.wait_for(self._registry.delete(self._describe()), timeout=2.0)
