"""Without a screen: plain pictures or JSON, an interval apart."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from rich.console import Console

from distserve.monitor.pace import Pace
from distserve.monitor.picture import Picture
from distserve.monitor.source import Source, decoded

Say = Callable[[str], None]


def pictures(source: Source, pace: Pace, console: Console) -> None:
    first = True
    for _ in pace:
        if (status := pace.tried(source.status)) is not None:
            if not first:
                console.print()
            first = False
            console.print(Picture(status, None))
            console.file.flush()


def documents(source: Source, pace: Pace, say: Say) -> None:
    """What the server says, whole, a line each: fields that this release does not know are kept."""

    def document() -> str:
        body = source.status_body()
        decoded(body)
        return msgspec.json.format(body, indent=-1).decode()

    for _ in pace:
        if (text := pace.tried(document)) is not None:
            say(text)
