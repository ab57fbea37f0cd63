"""The pictures of a report, each as SVG to stand in a page. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from distserve.bench.answers import Result
from distserve.bench.document import Document, Side
from distserve.bench.summary import Samples, arrivals, in_flight

COLOURS = {"": "#1f6fb4", "A": "#1f6fb4", "B": "#c4622d"}
WAIT, DECODE, FAILED = "#b9c9d8", "#1f6fb4", "#c23b3b"
MOST_ROWS = 240  # of the time line
MOST_POINTS = 2000  # of a curve
_BINS = 120  # of the run's time
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "svg.hashsalt": "distserve",  # the same figures give the same file
}


def pictures(document: Document) -> dict[str, str]:
    """Title -> SVG, in the order of the page; of the time lines, each side by its name."""
    with matplotlib.rc_context(_STYLE):
        found = {"Latency": latencies(document), "Over time": over_time(document)}
        return found | {side.name: time_line(document, side) for side in document.sides}


def latencies(document: Document) -> str:
    """Which share of samples is within which time: first token, between tokens, whole answer."""
    samples: dict[str, Samples] = {
        "time to first token": lambda r: [r.ttft_s()],
        "between tokens (ITL)": lambda r: r.gaps_s(),
        "whole answer (E2E)": lambda r: [r.e2e_s],
    }
    figure = _figure(11, 3.6)
    parts = figure.subplots(1, 3, sharey=True)
    for part, (title, of) in zip(parts, samples.items(), strict=True):
        for side in document.sides:
            ok = [r for r in document.of(side) if r.ok and r.due_s >= 0]
            values = sorted(1000 * v for r in ok for v in of(r) if v is not None and v > 0)
            if values:
                part.plot(
                    *_steps(values),
                    color=COLOURS[side.name],
                    label=side.name or None,
                    linewidth=1.6,
                    drawstyle="steps-post",
                )
        part.set(title=title, xscale="log", xlabel="ms", ylim=(0, 1.01))
        part.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        part.xaxis.set_minor_locator(NullLocator())
        part.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        _grid(part)
    for name, limit_s in document.slo.items():
        at = {"ttft": 0, "e2e": 2}.get(name)
        if at is not None:
            parts[at].axvline(1000 * limit_s, color="0.35", linestyle=":", linewidth=1.2)
    parts[0].set_ylabel("share within")
    parts[0].yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    _legend(parts[-1], document)
    return _svg(figure, "How long: the share of samples within a time, on a logarithmic axis")


def over_time(document: Document) -> str:
    """Tokens a second, and requests in flight, from the beginning to the end."""
    figure = _figure(11, 4.2)
    tokens, flight = figure.subplots(2, 1, sharex=True)
    first = min((r.due_s for r in document.results), default=0.0)
    last = max((r.done_s for r in document.results), default=1.0)
    width = max(1e-3, (last - first) / _BINS)
    for side in document.sides:
        results, colour = document.of(side), COLOURS[side.name]
        sums = [0.0] * (_BINS + 1)
        for at, num in (event for r in results for event in arrivals(r)):
            sums[int((at - first) / width)] += num
        edges = [first + i * width for i in range(_BINS + 2)]
        tokens.stairs([n / width for n in sums], edges, color=colour, linewidth=1.4, label=side.name or None)
        steps = in_flight(results)
        if steps:
            flight.step([t for t, _ in steps], [n for _, n in steps], where="post", color=colour, linewidth=1.1)
    tokens.set(title="output tokens/s", ylim=(0, None))
    flight.set(title="requests in flight", ylim=(0, None), xlabel="s since the measurement began")
    flight.yaxis.set_major_locator(MaxNLocator(integer=True))
    for part in (tokens, flight):
        _grid(part)
        if first < 0:
            part.axvspan(first, 0, color="0.93", zorder=0)
    if first < 0:
        tokens.annotate("warm-up", (first, 1), xycoords=("data", "axes fraction"), va="top", color="0.4", fontsize=9)
    _legend(tokens, document)
    return _svg(figure, "Output tokens a second and requests in flight over the run")


def time_line(document: Document, side: Side) -> str:
    """A line a request: until its first token, and from there to its last."""
    shown = rows(document.of(side))
    figure = _figure(11, min(8.0, 1.3 + 0.045 * max(20, len(shown))))
    part = figure.subplots()
    for row, r in enumerate(shown):
        if not r.ok:
            part.hlines(row, r.due_s, r.done_s, color=FAILED, linewidth=2)
            continue
        part.hlines(row, r.due_s, r.times_s[0], color=WAIT, linewidth=2)
        part.hlines(row, r.times_s[0], max(r.times_s[-1], r.times_s[0] + 1e-4), color=DECODE, linewidth=2)
    part.set(xlabel="s since the measurement began", ylabel="request", ylim=(len(shown), -1))
    for colour, label in ((WAIT, "until the first token"), (DECODE, "answering"), (FAILED, "failed")):
        if label != "failed" or any(not r.ok for r in shown):
            part.plot([], [], color=colour, linewidth=4, label=label)
    part.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.005, 1.0), ncols=3)
    part.margins(x=0.01)
    _grid(part)
    return _svg(figure, "Each request: when it was due, its first token, its last")


def rows(results: Sequence[Result]) -> list[Result]:
    """Those that are drawn: all, or evenly picked ones."""
    measured = [r for r in results if r.due_s >= 0]
    if len(measured) <= MOST_ROWS:
        return measured
    return [measured[i * len(measured) // MOST_ROWS] for i in range(MOST_ROWS)]


def _steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The shares of values in order, thinned to MOST_POINTS; the ends stay."""
    num = len(values)
    picked: Iterable[int] = range(num)
    if num > MOST_POINTS:
        picked = sorted({round(i * (num - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)})
    return [values[i] for i in picked], [(i + 1) / num for i in picked]


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _grid(part: Any) -> None:
    part.grid(alpha=0.25, linewidth=0.7)
    part.set_axisbelow(True)


def _legend(part: Any, document: Document) -> None:
    if len(document.sides) > 1:
        part.legend(frameon=False, loc="lower right")


def _svg(figure: Figure, label: str) -> str:
    """One <svg> element, without anything that is fetched, with a name for who can't see it."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
