"""The pictures of growth.py. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

if TYPE_CHECKING:
    from benchmarks.growth import Point

matplotlib.use("agg")

MIB = 1 << 20
_COLOURS = {"time": "#1f6fb4", "CPU": "#c4622d", "TTFT": "#3b8c4a", "memory": "#6d4c9f"}


def plot(series: Mapping[str, Sequence[Point]], folder: Path) -> list[Path]:
    """One picture an axis: what a request costs, on the left; the cluster's memory, on the right. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for axis, points in series.items():
        if points:
            paths.append(folder / f"growth_{axis.replace(' ', '_')}.png")
            _picture(axis, points).savefig(paths[-1], dpi=110)
    return paths


def _picture(axis: str, points: Sequence[Point]) -> Figure:
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    costs, memory = figure.subplots(1, 2)
    _curve(costs, points, "wall_s", 1e3, "time")
    _curve(costs, points, "cpu_s", 1e3, "CPU")
    _curve(costs, points, "ttft_s", 1e3, "TTFT")
    _guide(costs, points, "ttft_s", 1e3)
    costs.set(title="a request's cost", ylabel="ms", yscale="log")
    _curve(memory, points, "peak_bytes", 1 / MIB, "memory")
    memory.set(title="memory over what there was before, at its highest", ylabel="MiB", ylim=(0, None))
    for part in (costs, memory):
        part.set(xscale="log", xlabel=axis)
        part.set_xticks(sizes := sorted({p.size for p in points}), [f"{s:,}" for s in sizes])
        part.xaxis.set_minor_locator(NullLocator())
        part.grid(alpha=0.25)
        part.legend(frameon=False)
    return figure


def _curve(part: Any, points: Sequence[Point], key: str, scale: float, label: str) -> None:
    """Medians as a line, every run as a dot."""
    sizes = sorted({p.size for p in points})
    medians = [statistics.median(scale * getattr(p, key) for p in points if p.size == size) for size in sizes]
    part.plot(sizes, medians, color=_COLOURS[label], label=label)
    part.plot(
        [p.size for p in points], [scale * getattr(p, key) for p in points], ".", color=_COLOURS[label], alpha=0.5
    )


def _guide(part: Any, points: Sequence[Point], key: str, scale: float) -> None:
    """A line in step with the size, through the last point."""
    sizes = sorted({p.size for p in points})
    last = statistics.median(scale * getattr(p, key) for p in points if p.size == sizes[-1])
    part.plot(sizes, [last * size / sizes[-1] for size in sizes], ":", color="0.5", label="in step with the size")
