"""Around every request: an id in and out. And the bounded reading of a body."""

import re
import secrets

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distserve.errors import BodyTooLarge, Cancelled

_ID = re.compile(r"[\x21-\x7e]{1,128}")


def usable_id(given: str) -> str:
    """It, if it is printable ASCII of at most 128 characters without spaces; else empty."""
    return given if _ID.fullmatch(given) else ""


class RequestIds:
    """x-request-id: the client's if it is usable, else a new one. And the answer's status in the state, as `status`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = usable_id(given) or f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["state"]["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


async def read_json_body(request: Request, limit_bytes: int) -> bytes:
    """The body, if it may be JSON. Raises BodyTooLarge as soon as it is known, 415 for another content type."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HTTPException(415, f"content-type is {kind!r}, must be 'application/json'")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(int(declared), limit_bytes)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit_bytes:
                raise _too_large(len(body), limit_bytes)
    except ClientDisconnect as e:
        raise Cancelled("the client left while sending its request") from e
    return bytes(body)


def _too_large(size: int, limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {size} bytes or more, must have at most {limit_bytes}", value=size, expected=f"<= {limit_bytes}"
    )
