"""In front of every HTTP route: nobody gets in without an API key, where there are keys."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from distserve.errors import DistServeError, Unauthorized
from distserve_gateway.keys import Keys
from distserve_gateway.status_page import FILES

FREE = frozenset(FILES) | {
    "/docs",
    "/docs/oauth2-redirect",
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/metrics/cluster",
    "/openapi.json",
    "/status",
    "/version",
}
"""Paths for everybody. All others need a key, those that nobody has thought of yet too."""


class Guard:
    """Leaves the request's key in its state, as `api_key` (OPEN without keys). What it refuses, `refused(request,
    error)` answers, before any of the body is read."""

    def __init__(
        self, app: ASGIApp, keys: Keys, refused: Callable[[Request, DistServeError], Awaitable[Response]]
    ) -> None:
        self._app = app
        self._keys = keys
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in FREE:
            authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            try:
                scope["state"]["api_key"] = self._keys.of(authorization.decode("latin-1"))
            except Unauthorized as e:
                response = await self._refused(Request(scope, receive), e)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
