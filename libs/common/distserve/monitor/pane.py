"""A part of the picture: how many lines it wants, and how it looks in those it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from distserve.monitor.fitting import Want
from distserve.monitor.words import cells, clean

Cell = str | Text
Draw = Callable[[int, int], RenderableType]  # (lines, characters) -> what is not larger

GOOD, DOUBTFUL, BAD, QUIET, HEADING = "green", "yellow", "bold red", "dim", "bold cyan"
_STATUS = {"ok": GOOD, "warming": DOUBTFUL, "degraded": DOUBTFUL, "draining": DOUBTFUL}


@dataclass(frozen=True, slots=True)
class Pane:
    name: str
    want: Want
    draw: Draw


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    justify: Literal["left", "right"] = "right"
    min_width: int | None = None


LEFT: Literal["left"] = "left"


def grid(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, headings: bool = True) -> Table:
    """One line a row, and one of headings. What is too long for the screen is cut, with an ellipsis."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=HEADING, show_header=headings)
    for column in columns:
        table.add_column(
            column.heading, justify=column.justify, min_width=column.min_width, no_wrap=True, overflow="ellipsis"
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row))
    return table


def line(*parts: tuple[str, str] | str) -> Text:
    """One line of (text, style)."""
    made = Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        words, style = (part, "") if isinstance(part, str) else part
        made.append(clean(words), style)
    return made


def bar(width: int, *parts: tuple[float, str, str]) -> Text:
    """(share of 1, character, style) each, then dots."""
    text = Text()
    counts = cells(width, *(share for share, _, _ in parts))
    for count, (_, character, style) in zip(counts, parts, strict=True):
        text.append(character * count, style)
    return text.append("·" * (width - sum(counts)), QUIET)


def status_style(status: str) -> str:
    return _STATUS.get(status, BAD)


def shown(rows: Sequence[Sequence[Cell]], num: int, matters: Sequence[bool]) -> list[Sequence[Cell]]:
    """At most `num` of them, in their order: those that matter first. If some are left out, the last line says how
    many."""
    if len(rows) <= num:
        return list(rows)
    ranked = sorted(range(len(rows)), key=lambda i: not matters[i])
    kept = sorted(ranked[: max(0, num - 1)])
    left_out = len(rows) - len(kept)
    return [*(rows[i] for i in kept), (Text(f"… {left_out} more", QUIET),)][:num]
