"""The pictures of store_index.py and store_eviction.py. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

if TYPE_CHECKING:
    from benchmarks.store_eviction import Cell
    from benchmarks.store_index import Point

matplotlib.use("agg")

_STYLES = {
    "optimal": {"color": "0.55", "ls": "--", "label": "best possible (Belady's MIN)"},
    "lfu": {"color": "#1f6fb4", "marker": "o", "label": "lfu (W-TinyLFU)"},
    "lru": {"color": "#c4622d", "marker": "s", "label": "lru"},
}


def plot_eviction(cells: Mapping[str, Sequence[Cell]], path: Path) -> None:
    """A panel a trace: hit rate over the size of the store, as a part of all the blocks that the trace asks for. Lines
    are means over seeds, the bands go from the least to the highest."""
    figure = Figure(figsize=(4.2 * len(cells), 4.2), layout="constrained")
    panels = figure.subplots(1, len(cells), sharey=True, squeeze=False)[0]
    for panel, (trace, its) in zip(panels, cells.items(), strict=True):
        sizes = [cell.size for cell in its]
        for kind, style in _STYLES.items():
            rates = [cell.rates[kind] for cell in its]
            panel.plot(sizes, [sum(r) / len(r) for r in rates], ms=4, **style)
            panel.fill_between(sizes, list(map(min, rates)), list(map(max, rates)), color=style["color"], alpha=0.15)
        panel.set(title=trace, xlabel="blocks that the store holds, of all asked for", xscale="log", ylim=(0, 1))
        panel.set_xticks(sizes, [f"{size:.1%}".replace(".0%", "%") for size in sizes])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("blocks found, of those asked for")
    panels[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    panels[0].legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def plot_index(points: Sequence[Point], path: Path) -> None:
    """Memory on the left, time of a lookup on the right, over the number of blocks, with the aims."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    memory, lookup = figure.subplots(1, 2)
    sizes = [p.num_blocks for p in points]
    memory.plot(sizes, [p.all_bytes for p in points], "o-", color="#6d4c9f", label="all that is allocated")
    memory.plot(sizes, [p.table_bytes for p in points], "s-", color="#3b8c4a", label="columns and hash table")
    memory.axhline(200, color="0.5", ls=":", label="aim: below this")
    memory.set(title="memory a block", ylabel="bytes", ylim=(0, 220))
    lookup.plot(sizes, [p.lookup_us[0] / 1e3 for p in points], "o-", color="#1f6fb4", label="all there")
    lookup.plot(sizes, [p.absent_us[0] / 1e3 for p in points], "s-", color="#c4622d", label="none there")
    lookup.axhline(1, color="0.5", ls=":", label="aim: below this")
    lookup.set(title="looking up a chain of 2,000 blocks, median", ylabel="ms", ylim=(0, 1.4))
    for panel in (memory, lookup):
        panel.set(xscale="log", xlabel="blocks in the index")
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.25)
        panel.legend(frameon=False, loc="upper left" if panel is lookup else "lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
