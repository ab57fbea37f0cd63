"""Server-sent events, taken apart after they came (WHATWG HTML, 9.2.6): only what a stream of JSON needs."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from distserve.bench.wire import Piece

_END = re.compile(rb"\r?\n\r?\n")
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Events:
    """`events`: (s, data) of each before [DONE]; an event came when the piece came that completed it. `done`: there was
    a [DONE]. `rest`: what followed the last whole event."""

    events: list[tuple[float, bytes]]
    done: bool
    rest: bytes


def read_events(body: Sequence[Piece]) -> Events:
    raw = b"".join(data for _, data in body)
    starts, offset = [], 0
    for _, data in body:
        starts.append(offset)
        offset += len(data)
    found: list[tuple[float, bytes]] = []
    begin = 0
    for match in _END.finditer(raw):
        event = _data(raw[begin : match.start()])
        begin = match.end()
        if event == DONE:
            return Events(found, True, b"")
        if event is not None:
            found.append((body[bisect_right(starts, begin - 1) - 1][0], event))
    return Events(found, False, raw[begin:])


def _data(block: bytes) -> bytes | None:
    """Of one event; None of a comment, which keeps a connection alive."""
    if block.startswith(b"data:") and b"\n" not in block:  # nearly all
        return block[5:].strip()
    lines = [line[5:].strip() for line in block.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
