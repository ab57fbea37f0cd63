"""The NATS server of a cluster on one machine: started again on its port when it dies, so that services reconnect."""

import asyncio
import contextlib
import os
import time
from types import TracebackType
from typing import Self

from distserve.bus.embedded import EmbeddedNats
from distserve.errors import BusError
from distserve.supervisor import Backoff, Emit

_POLL_S = 0.25


class OwnNats:
    """`async with` it, on the main thread. What JetStream held in memory is gone after a restart; heartbeats make the
    registry anew."""

    def __init__(self, emit: Emit, backoff: Backoff | None = None) -> None:
        self._emit = emit
        self._backoff = backoff or Backoff()
        self._server = EmbeddedNats()
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Stays the same over restarts."""
        return self._url

    @property
    def pid(self) -> int | None:
        """Of the live server, None while there is none."""
        try:
            return self._server.pid
        except BusError:
            return None

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        self._url, self._port = self._server.url, self._server.port
        self._task = asyncio.create_task(self._keep(), name="keep nats-server")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        # Shielded: a second Ctrl-C cancels the task that is in here, and the server must go all the same.
        await asyncio.shield(asyncio.to_thread(self._server.stop))

    async def _keep(self) -> None:
        num_deaths = 0
        began = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_S)
            pid = self.pid
            if pid is not None and not _ended(pid):
                continue
            num_deaths = 1 if time.monotonic() - began >= self._backoff.healthy_s else num_deaths + 1
            delay_s = self._backoff.delay_s(num_deaths)
            self._emit("", f"the NATS server died: again at {self._url} in {delay_s:g} s")
            await asyncio.to_thread(self._server.stop)
            await asyncio.sleep(delay_s)
            self._server = EmbeddedNats(port=self._port)
            began = time.monotonic()
            with contextlib.suppress(BusError):  # its port may be held for a moment: the next turn tries again
                await self._server.__aenter__()


def _ended(pid: int) -> bool:
    """Whether this child has ended, without taking its status from whoever will wait for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
