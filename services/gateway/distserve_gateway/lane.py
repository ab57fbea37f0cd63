"""A short way for the routes that answer with tokens, past the layers that a web framework puts around each message.

Those layers (five wrapped calls for each event of a stream, dependency solving for each request) cost more than all
else that a token needs. The routes behind are the same ones; they stay where they are for everything but a POST, and
for the documentation.
"""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from distserve_gateway.calls import Kind


class Lane:
    """POST to a path of `kinds` is answered by `answer(request, kind)`, and `failed(request, error)` if that raises;
    all else goes to `app`. What a response raises once it has begun is the server's to see: it cuts the connection."""

    def __init__(
        self,
        app: ASGIApp,
        kinds: Mapping[str, Kind],
        answer: Callable[[Request, Kind], Awaitable[Response]],
        failed: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app = app
        self._kinds = kinds
        self._answer = answer
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = self._kinds.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if kind is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await self._answer(request, kind)
        except Exception as e:
            response = await self._failed(request, e)
        await response(scope, receive, send)
