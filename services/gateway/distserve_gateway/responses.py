"""Answers over HTTP. Both watch for the client going away, which cancels what runs for it.

Starlette's own streaming response would start a task group for each; here it is one watcher and one loop.
"""

import asyncio
import logging
from abc import abstractmethod
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from distserve.errors import Cancelled, DistServeError
from distserve_gateway.answer import Answer
from distserve_gateway.errors_http import error_json, error_response
from distserve_gateway.rendering import Renderer

log = logging.getLogger(__name__)

_DATA, _END, _DONE = b"data: ", b"\n\n", b"data: [DONE]\n\n"


async def _watch(receive: Receive, answer: Answer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.abort("the client is gone")


class AnswerResponse(Response):
    """`limit_s` bounds the whole response: a client that stops reading must not hold it for ever."""

    def __init__(self, renderer: Renderer, limit_s: float) -> None:
        super().__init__()
        self.renderer = renderer
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.renderer.answer
        watcher = asyncio.create_task(_watch(receive, answer))
        try:
            async with answer, asyncio.timeout(self._limit_s):
                await self.respond(scope, receive, send)
        except Cancelled as e:
            log.debug("%s: %s", answer.call.request_id, e)
        finally:
            watcher.cancel()

    @abstractmethod
    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class WholeResponse(AnswerResponse):
    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for pieces in self.renderer.answer.pieces():
                self.renderer.collect(pieces)
        except Cancelled:
            raise
        except DistServeError as e:
            await error_response(e)(scope, receive, send)
            return
        await Response(self.renderer.whole(), media_type="application/json")(scope, receive, send)


class StreamResponse(AnswerResponse):
    """Server-sent events: a chunk an event, `[DONE]` at the end; an error is an event too, and the last one."""

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        message: dict[str, Any] = {"type": "http.response.body", "more_body": True}
        try:
            async for pieces in self.renderer.answer.pieces():
                await send(message | {"body": events(self.renderer.chunks(pieces))})
            tail = events(self.renderer.last_chunks()) + _DONE
        except Cancelled:
            raise
        except DistServeError as e:
            log.warning("%s ended early: %s", self.renderer.call.request_id, e)
            tail = events([error_json(e)])
        await send({"type": "http.response.body", "body": tail, "more_body": False})


def events(chunks: list[bytes]) -> bytes:
    return b"".join([_DATA + chunk + _END for chunk in chunks])
