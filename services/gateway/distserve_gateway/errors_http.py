"""DistServe's errors in OpenAI's shape: {"error": {message, type, param, code}}, with status and headers.

`retry_after_ms` stands in the error object too where it is known: a stream and a message on NATS have no headers.
"""

import math
from typing import Any

import msgspec
from starlette.responses import Response

from distserve.errors import DistServeError, Forbidden, InvalidRequest, PayloadTooLarge

UNAVAILABLE_RETRY_S = 1.0  # of a 503 that does not say

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "cancelled",
    502: "worker_error",
    503: "service_unavailable",
    504: "timeout_error",
}


def error_object(message: str, *, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_json(error: DistServeError) -> bytes:
    """The JSON of an error: a body, the data of an error event, or a message on NATS."""
    param = _text(error.fields.get("param")) if isinstance(error, InvalidRequest | Forbidden) else None
    found = error_object(error.message, status=error.http_status, code=error.code, param=param)
    if (retry_s := retry_after_s(error)) is not None:
        found["error"]["retry_after_ms"] = _ms(retry_s)
    return msgspec.json.encode(found)


def retry_after_s(error: DistServeError) -> float | None:
    """What the error says about trying again; None: nothing."""
    value = error.fields.get("retry_after_s")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return max(0.0, value)


def _ms(seconds: float) -> int:
    """Never too early; but an error of rounding is no millisecond."""
    return math.ceil(round(seconds * 1000, 3))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def error_response(error: DistServeError) -> Response:
    return Response(error_json(error), error.http_status, _headers(error), media_type="application/json")


def _headers(error: DistServeError) -> dict[str, str]:
    status, retry_s = error.http_status, retry_after_s(error)
    if status == 503 and retry_s is None:
        retry_s = UNAVAILABLE_RETRY_S
    if status in (429, 503) and retry_s is not None:
        return {"retry-after": str(math.ceil(_ms(retry_s) / 1000)), "retry-after-ms": str(_ms(retry_s))}
    if status == 429:  # it would be the same later; OpenAI's clients know this header
        return {"x-should-retry": "false"}
    if status == 401:
        return {"www-authenticate": "Bearer"}
    if status == 413 and not isinstance(error, PayloadTooLarge):
        return {"connection": "close"}  # the rest of the body is not read
    return {}


INTERNAL_ERROR = error_json(DistServeError("internal error"))
"""What a fault of our own is to a client: details are in the log, under the request's id."""


def plain_error(message: str, *, status: int, code: str) -> Response:
    """For what has no DistServeError: unknown routes, wrong methods, a wrong content type."""
    body = msgspec.json.encode(error_object(message, status=status, code=code))
    return Response(body, status, media_type="application/json")
