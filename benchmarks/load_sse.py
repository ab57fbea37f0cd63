"""What came over a connection, taken apart after the measurement: HTTP/1.1, chunks, server-sent events, tokens.

The client only stamps each piece of bytes with the time at which it came; nothing is parsed while servers compete for
the cores. An event's time is that of the piece that completed it.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Piece = tuple[float, bytes]  # seconds since the request was sent, what came then


class BadAnswer(Exception):
    """An answer that is no complete stream of tokens: an error status, an error event, a stream without [DONE]."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of one answer: when each event with tokens came (s after the request was sent), and how many it brought."""

    times_s: list[float]
    counts: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


def head(pieces: Sequence[Piece]) -> tuple[int, dict[str, str]]:
    """Status and headers (names in lower case). Raises BadAnswer for what is not HTTP."""
    lines = b"".join(data for _, data in pieces).partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    status = lines[0].split(" ", 2)[1:2]
    if not lines[0].startswith("HTTP/1.1") or not status or not status[0].isdigit():
        raise BadAnswer(f"not HTTP: {lines[0][:200]!r}")
    pairs = (line.partition(":") for line in lines[1:])
    return int(status[0]), {name.strip().lower(): value.strip() for name, _, value in pairs}


def tokens(pieces: Sequence[Piece]) -> Tokens:
    """Of a streamed completion that was asked with `return_token_ids`. Raises BadAnswer."""
    found = Tokens([], [])
    for at_s, data in events(pieces):
        event = json.loads(data)
        if "error" in event:
            raise BadAnswer(f"error event: {event['error']}")
        count = sum(_num_ids(choice) for choice in event["choices"])
        if count:
            found.times_s.append(at_s)
            found.counts.append(count)
    return found


def _num_ids(choice: dict[str, Any]) -> int:
    ids = choice.get("token_ids")
    if ids is None and choice.get("text"):
        raise BadAnswer("text without token_ids: the server does not know return_token_ids")
    return len(ids or ())


def events(pieces: Sequence[Piece]) -> list[tuple[float, bytes]]:
    """(seconds, data) of every event before [DONE]. Raises BadAnswer."""
    found: list[tuple[float, bytes]] = []
    body, times = _body(pieces)
    start = 0
    while (end := body.find(b"\n\n", start)) >= 0:
        data = body[start:end].strip().removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return found
        found.append((times.of(end + 1), data))
        start = end + 2
    raise BadAnswer(f"the stream ended without [DONE]: {bytes(body[-200:])!r}")


class _Times:
    """When the byte at an offset came."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._times_s: list[float] = []

    def add(self, start: int, at_s: float) -> None:
        self._starts.append(start)
        self._times_s.append(at_s)

    def of(self, offset: int) -> float:
        return self._times_s[bisect_right(self._starts, offset) - 1]


def _body(pieces: Sequence[Piece]) -> tuple[bytes, _Times]:
    """The body without the chunks' framing, and when its bytes came. Raises BadAnswer."""
    raw = b"".join(data for _, data in pieces)
    came = _Times()
    offset = 0
    for at_s, data in pieces:
        came.add(offset, at_s)
        offset += len(data)
    head, found, _ = raw.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not found or status != [b"200"]:
        raise BadAnswer(f"HTTP {raw[:500]!r}")
    if b"transfer-encoding: chunked" not in head.lower():
        raise BadAnswer("the answer is not chunked: no stream")
    return _dechunked(raw, len(head) + 4, came)


def _dechunked(raw: bytes, offset: int, came: _Times) -> tuple[bytes, _Times]:
    body = bytearray()
    times = _Times()
    while True:
        line_end = raw.find(b"\r\n", offset)
        size = int(raw[offset:line_end].split(b";")[0], 16) if line_end > offset else -1
        start, offset = line_end + 2, line_end + 2 + size + 2
        if size < 0:
            raise BadAnswer(f"the connection ended inside a chunk: {raw[-200:]!r}")
        if size == 0:
            return bytes(body), times
        # A chunk is there when its last byte is.
        times.add(len(body), came.of(start + size - 1))
        body += raw[start : start + size]
