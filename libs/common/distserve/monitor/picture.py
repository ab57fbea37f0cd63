"""The whole picture: which panes, where, and as grey as it is old."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from distserve.monitor import figures, kv_flows, services, wrongs
from distserve.monitor.fitting import fit
from distserve.monitor.pane import BAD, QUIET, Pane, line
from distserve.monitor.words import age
from distserve.status import ClusterStatus

TWO_COLUMNS = 180  # characters from which panes stand side by side
_GAP = 3
_JOINED = ("warnings", "stages")  # to the pane above
_FOOT_FROM = 12  # lines from which there is one for the keys

Line = list[Segment]


class Picture:
    """A ClusterStatus in at most `height` lines, as wide as the console. None: as many lines as it takes.

    trouble: why there is no newer one; then it is grey, and a line says so and how old it is. foot: the last line.
    """

    def __init__(
        self,
        status: ClusterStatus | None,
        height: int | None,
        *,
        trouble: str = "",
        age_s: float = 0.0,
        foot: str = "",
    ) -> None:
        self._status = status
        self._height = height
        self._trouble = trouble
        self._age_s = age_s
        self._foot = foot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        lines = self._lines(console, options, width)
        for i, segments in enumerate(lines):
            if i:
                yield Segment.line()
            yield from segments

    def _lines(self, console: Console, options: ConsoleOptions, width: int) -> list[Line]:
        top: list[Text] = []
        if self._trouble:
            old = f" The last picture, {age(self._age_s)} old:" if self._status else " Trying again."
            top.append(line((self._trouble + ".", BAD), (old, "")))
        elif self._status is None:
            top.append(line(("waiting for the first answer", QUIET)))
        height = self._height
        foot = bool(self._foot) and (height is None or height >= _FOOT_FROM)
        room = None if height is None else max(0, height - len(top) - foot)
        body: list[Line] = []
        if self._status is not None:
            body = arranged(console, options, self._status, width, room)
            if self._trouble:
                body = [[Segment(s.text, Style(dim=True)) for s in segments] for segments in body]
        if foot and room is not None:
            body += [[Segment(" " * width)]] * (room - len(body))
        ends = [line((self._foot, QUIET))] if foot else []
        first, last = (
            [row for text in texts for row in _drawn(console, options, text, width)] for texts in (top, ends)
        )
        return [*first, *body, *last][:height]


def arranged(
    console: Console, options: ConsoleOptions, status: ClusterStatus, width: int, height: int | None
) -> list[Line]:
    """All that there is room for."""
    head = [figures.head(status), wrongs.warnings(status, width)]
    left = [figures.latency(status), figures.stages(status), services.services(status)]
    right = [figures.classes(status), kv_flows.tiers(status), kv_flows.flows(status), wrongs.troubles(status)]
    if width < TWO_COLUMNS:
        return column(console, options, [*head, *left, *right], width, height)
    top = column(console, options, head, width, height)
    below = None if height is None else height - len(top) - 1
    if below is not None and below <= 0:
        return top[:height]
    left_width = (width - _GAP) * 11 // 20
    sides = (left_width, left), (width - _GAP - left_width, right)
    one, other = (column(console, options, panes, of, below) for of, panes in sides)
    gap, blank = Segment(" " * _GAP), [Segment(" " * width)]
    rows = range(max(len(one), len(other)))
    return [*top, blank, *([*_at(one, i, sides[0][0]), gap, *_at(other, i, sides[1][0])] for i in rows)]


def column(
    console: Console, options: ConsoleOptions, panes: Sequence[Pane], width: int, height: int | None
) -> list[Line]:
    """Panes one below the other, the less important left out where there is no room for them; a blank line between
    two, where there is room for that too."""
    wants = [pane.want for pane in panes]
    lines = fit(wants, sum(w.most for w in wants) if height is None else height)
    shown = [(pane, num) for pane, num in zip(panes, lines, strict=True) if num]
    spare = len(shown) if height is None else height - sum(lines)
    drawn: list[Line] = []
    for i, (pane, num) in enumerate(shown):
        if i and spare > 0 and pane.name not in _JOINED:
            drawn.append([Segment(" " * width)])
            spare -= 1
        drawn += _drawn(console, options, pane.draw(num, width), width)[:num]
    return drawn


def _drawn(console: Console, options: ConsoleOptions, part: RenderableType, width: int) -> list[Line]:
    return console.render_lines(part, options.update(width=width, height=None), pad=True)


def _at(rows: Sequence[Line], i: int, width: int) -> Line:
    return rows[i] if i < len(rows) else [Segment(" " * width)]
