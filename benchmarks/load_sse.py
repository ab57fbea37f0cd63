"""What came over a connection, taken apart after the measurement: HTTP, server-sent events, tokens.

The client only stamps each piece of bytes with the time at which it came; nothing is parsed while servers compete for
the cores. HTTP and events are `distserve bench`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distserve.bench.sse import read_events
from distserve.bench.wire import BadAnswer, Piece, Reading

__all__ = ["BadAnswer", "Piece", "Tokens", "events", "head", "tokens"]


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
    reading = _read(pieces)
    if not reading.status:
        reading.end()
    return reading.status, reading.headers


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
    reading = _read(pieces)
    reading.end()
    if reading.status != 200:
        raise BadAnswer(f"HTTP {reading.status}: {reading.content()[:500]!r}")
    if not reading.is_chunked:
        raise BadAnswer("the answer is not chunked: no stream")
    found = read_events(reading.body)
    if not found.done:
        raise BadAnswer(f"the stream ended without [DONE]: {reading.content()[-200:]!r}")
    return found.events


def _read(pieces: Sequence[Piece]) -> Reading:
    reading = Reading()
    for at_s, data in pieces:
        reading.feed(at_s, data)
    return reading
