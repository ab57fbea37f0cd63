"""Answers over HTTP. A client that goes away cancels what runs for it, and hears no more; one whose request is ended in
another way before its time (a DELETE, its deadline) is told by an error: a stream by its last event, without `[DONE]`.

Starlette's own streaming response would start a task group for each; here it is one watcher and one loop.
"""

import asyncio
import logging
from abc import abstractmethod

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from distserve.errors import Cancelled, DeadlineExceeded, DistServeError
from distserve_gateway.client import Client, ClientGone
from distserve_gateway.errors_http import INTERNAL_ERROR, error_json, error_response
from distserve_gateway.rendering import Renderer

log = logging.getLogger(__name__)

END_S = 5.0  # for a whole answer, or a stream's last event, to be taken

_DONE = b"data: [DONE]\n\n"


class AnswerResponse(Response):
    """`limit_s` bounds the answer, END_S what is sent after it: a client that stops reading holds nothing for ever.
    `client`: who waits for it, if it is watched already; closed at the end."""

    def __init__(self, renderer: Renderer, limit_s: float, client: Client | None = None) -> None:
        super().__init__()
        self.renderer = renderer
        self.limit_s = limit_s
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.renderer.answer
        client = self._client or Client(receive)
        client.on_gone(lambda: answer.run.cancel(ClientGone("the client is gone")))
        try:
            async with answer:
                await self.respond(scope, receive, send)
        except ClientGone as e:
            log.debug("%s: %s", answer.call.request_id, e)
        except TimeoutError:
            log.warning("%s: the client does not read", answer.call.request_id)
            raise
        finally:
            client.close()

    def too_late(self) -> DeadlineExceeded:
        error = DeadlineExceeded(f"the answer took longer than {self.limit_s:g} s, the limit of this gateway")
        self.renderer.call.trace.failed(error)
        return error

    def served_by(self) -> dict[str, str]:
        """The header that says so, if not this service alone served it."""
        name = self.renderer.answer.served_by
        return {"x-served-by": name} if name else {}

    @abstractmethod
    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class WholeResponse(AnswerResponse):
    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self.limit_s):
                async for pieces in self.renderer.answer.pieces():
                    self.renderer.collect(pieces)
            response = Response(self.renderer.whole(), headers=self.served_by(), media_type="application/json")
        except ClientGone:
            raise
        except DistServeError as e:
            response = error_response(e)
        except TimeoutError:
            response = error_response(self.too_late())
        async with asyncio.timeout(END_S):
            await response(scope, receive, send)


class StreamResponse(AnswerResponse):
    """Server-sent events: a chunk an event, `[DONE]` at the end; an error is an event too, and the last one."""

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.encode(), value.encode()) for name, value in self.served_by().items()),
        ]
        names = scope["state"]["request_id"], self.renderer.call.request_id
        try:
            async with asyncio.timeout(self.limit_s):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                async for pieces in self.renderer.answer.pieces():
                    body = events(self.renderer.chunks(pieces))
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            tail = events(self.renderer.last_chunks()) + _DONE
        except ClientGone:
            raise
        except DistServeError as e:
            wanted = isinstance(e, Cancelled | DeadlineExceeded)  # by whoever asked
            log.log(logging.INFO if wanted else logging.WARNING, "%s (%s) ended early: %s", *names, e)
            tail = events([error_json(e)])
        except TimeoutError:
            late = self.too_late()
            log.warning("%s (%s) ended early: %s", *names, late)
            tail = events([error_json(late)])
        except Exception as e:
            log.exception("%s (%s) failed in mid-stream", *names)
            self.renderer.call.trace.failed(e)
            tail = events([INTERNAL_ERROR])
        async with asyncio.timeout(END_S):
            await send({"type": "http.response.body", "body": tail, "more_body": False})


def events(chunks: list[bytes]) -> bytes:
    if len(chunks) == 1:
        return b"data: %b\n\n" % chunks[0]
    return b"".join([b"data: %b\n\n" % chunk for chunk in chunks])
