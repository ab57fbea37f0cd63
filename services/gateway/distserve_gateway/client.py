"""Whoever waits for an answer over HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import Receive

from distserve.errors import Cancelled

T = TypeVar("T")


class ClientGone(Cancelled):
    """Nobody is there who could be told."""


class Client:
    """Watched from the end of its request on, until close(): once it has gone away `on_gone` is called."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._on_gone: Callable[[], object] = lambda: None
        self._watching = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._on_gone()

    def on_gone(self, callback: Callable[[], object]) -> None:
        """In place of what was called before; at once if it is gone already."""
        self._on_gone = callback
        if self.gone:
            callback()

    async def while_here(self, work: Awaitable[T]) -> T:
        """`work`, cancelled when the client goes away: then ClientGone is raised."""
        try:
            async with asyncio.timeout(None) as scope:
                self.on_gone(lambda: scope.reschedule(0.0))
                return await work
        except TimeoutError:
            if not self.gone:
                raise
            raise ClientGone("the client is gone") from None
        finally:
            self._on_gone = lambda: None

    def close(self) -> None:
        """Watch it no more."""
        self._watching.cancel()
