"""DistServe's errors in OpenAI's shape: {"error": {message, type, param, code}}, with the status and Retry-After."""

import math
from typing import Any

import msgspec
from starlette.responses import Response

from distserve.errors import DistServeError, InvalidRequest, PayloadTooLarge

_TYPES = {
    404: "not_found_error",
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
    return msgspec.json.encode(
        error_object(
            error.message,
            status=error.http_status,
            code=error.code,
            param=_text(error.fields.get("param")) if isinstance(error, InvalidRequest) else None,
        )
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def error_response(error: DistServeError) -> Response:
    headers = {}
    retry_after_s = error.fields.get("retry_after_s")
    if error.http_status == 503:
        seconds = float(retry_after_s) if isinstance(retry_after_s, int | float) else 1.0
        headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
    if error.http_status == 413 and not isinstance(error, PayloadTooLarge):
        headers["connection"] = "close"  # the rest of the body is not read
    return Response(error_json(error), error.http_status, headers, media_type="application/json")


INTERNAL_ERROR = error_json(DistServeError("internal error"))
"""What a fault of our own is to a client: details are in the log, under the request's id."""


def plain_error(message: str, *, status: int, code: str) -> Response:
    """For what has no DistServeError: unknown routes, wrong methods, a wrong content type."""
    body = msgspec.json.encode(error_object(message, status=status, code=code))
    return Response(body, status, media_type="application/json")
