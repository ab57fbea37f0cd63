"""Bytes of a request to a body struct; what is wrong with them is said with the field, its value and the type."""

import functools
import logging
import re
from typing import Any

import msgspec

from distserve.errors import InvalidRequest
from distserve_gateway.schema import B, Body
from distserve_gateway.unsupported import refuse_unsupported

log = logging.getLogger(__name__)

_MAX_SHOWN = 60
_SECRET = ("cache_salt",)  # fields whose value no message repeats


@functools.cache
def _decoder(kind: type[Body]) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(kind)


def decode_body(kind: type[B], data: bytes) -> B:
    """The body. Raises InvalidRequest (`param` is the JSON path) or UnsupportedFeature."""
    try:
        body: B = _decoder(kind).decode(data)
    except msgspec.ValidationError as e:
        raise _explain(str(e), data) from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise InvalidRequest(f"the body is not valid JSON: {e}", expected="a JSON object") from e
    refuse_unsupported(kind, data)
    if log.isEnabledFor(logging.DEBUG):
        unknown = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys() - set(kind.__struct_fields__)
        if unknown:
            log.debug("ignored unknown fields: %s", ", ".join(sorted(unknown)))
    return body


def _explain(problem: str, data: bytes) -> InvalidRequest:
    what, _, path = problem.partition(" - at ")
    path = path.strip("`").removeprefix("$").removeprefix(".")
    what = what.replace(" | null", "").replace("`", "")
    if not path:
        if missing := re.search(r"required field (\S+)", what):
            return InvalidRequest(f"{missing[1]} is missing", param=missing[1])
        return InvalidRequest(f"the body must be a JSON object: {what}", expected="a JSON object")
    if what == "Number out of range":
        expected = "a number below 1.8e308"
        return InvalidRequest(f"{path} is out of range, must be {expected}", param=path, expected=expected)
    expected, _, got = what.partition(", got ")
    expected = expected.removeprefix("Expected ")
    try:
        value = f"of type {got}" if path in _SECRET else _shown(_at(msgspec.json.decode(data), path))
    except (LookupError, TypeError, msgspec.DecodeError):
        value = f"of type {got}" if got else "not valid"
    return InvalidRequest(f"{path} is {value}, must be of type {expected}", param=path, value=value, expected=expected)


def _at(value: Any, path: str) -> Any:
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        value = value[name] if name else value[int(index)]
    return value


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
