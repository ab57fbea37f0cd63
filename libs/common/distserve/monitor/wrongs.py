"""What is wrong: what rules and services say now, and what happened lately."""

from __future__ import annotations

import textwrap

from rich.console import Group, RenderableType
from rich.text import Text

from distserve.monitor.fitting import Want
from distserve.monitor.pane import BAD, DOUBTFUL, LEFT, QUIET, Column, Pane, grid, line
from distserve.monitor.words import age, clean
from distserve.status import ClusterStatus

_MOST_WARNINGS, _MOST_TROUBLES = 12, 8  # lines
_MARK = "! "


def warnings(status: ClusterStatus, width: int) -> Pane:
    """Rules with their advice, then why services are not well, where no rule has said it. Whole where there is room,
    the first ones first, else a line each."""
    found = [clean(text) for text in told(status)]
    wrapping = textwrap.TextWrapper(max(20, width - len(_MARK)))
    whole = [wrapping.wrap(text) for text in found]

    def draw(lines: int, width: int) -> RenderableType:
        num = len(found) if len(found) <= lines else lines - 1
        spare = lines - len(found)
        rows: list[Text] = []
        for text, parts in zip(found[:num], whole, strict=False):
            kept = parts if len(parts) - 1 <= spare else [text]
            spare -= len(kept) - 1
            rows += [line(("  " if i else _MARK, BAD), (part, DOUBTFUL)) for i, part in enumerate(kept)]
        if num < len(found):
            rows.append(line((f"  … {len(found) - num} more", QUIET)))
        return Group(*rows)

    most = min(_MOST_WARNINGS, max(len(found), sum(map(len, whole))))
    return Pane("warnings", Want(min(4, len(found)), most, 1), draw)


def told(status: ClusterStatus) -> list[str]:
    found = [w.message for w in status.warnings]
    for s in status.services:
        found += [f"{s.id}: {reason}" for reason in s.reasons if not any(reason in text for text in found)]
    reasons = [reason for s in status.services for reason in s.reasons]
    for reason in status.gateway.reasons:
        if not any(reason in text for text in found) and not any(known in reason for known in reasons):
            found.append(f"{status.gateway.id}: {reason}")
    return found


def troubles(status: ClusterStatus) -> Pane:
    """The newest first."""

    def draw(lines: int, width: int) -> RenderableType:
        columns = [Column("ERRORS", LEFT), Column("service", LEFT), Column("code", LEFT), Column("", LEFT)]
        rows = [
            (Text(f"{age(status.at_unix_s - t.at_unix_s)} ago", QUIET), t.service, Text(t.code, BAD), t.message)
            for t in status.troubles[: lines - 1]
        ]
        return grid(columns, rows)

    num = min(_MOST_TROUBLES, len(status.troubles))
    return Pane("troubles", Want(2, 1 + num, 7) if num else Want(0, 0, 7), draw)
