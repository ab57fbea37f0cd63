"""The picture of a simulation. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.sim.figures import Figures

matplotlib.use("agg")

_STYLES = {
    "fcfs": {"color": "#c4622d", "marker": "s", "label": "first come, first served"},
    "slo": {"color": "#1f6fb4", "marker": "o", "label": "by due times and fair shares"},
    "slo, admission": {"color": "#3b8c4a", "marker": "^", "label": "the same, with admission"},
}


def plot(found: Mapping[str, Sequence[Figures]], path: Path) -> None:
    """A row a machine: promises kept, of all; the same of the shortest prompts; TTFT P99 of the shortest."""
    figure = Figure(figsize=(12.6, 3.8 * len(found)), layout="constrained")
    for row, (machine, its) in zip(figure.subplots(len(found), 3, squeeze=False), found.items(), strict=True):
        kept, short, late = row
        for side, style in _STYLES.items():
            mine = [f for f in its if f.side == side]
            loads = [f.load for f in mine]
            kept.plot(loads, [f.kept for f in mine], ms=4, **style)
            short.plot(loads, [f.kept_by_bucket["<= 512"] for f in mine], ms=4, **style)
            late.plot(loads, [f.ttft_s["<= 512"][1] for f in mine], ms=4, **style)
        kept.set(title=f"{machine}: promises kept", ylim=(0, 1.02))
        short.set(title="prompts up to 512 tokens: promises kept", ylim=(0, 1.02))
        late.set(title="the same: TTFT P99 of those not refused, s", yscale="log")
        for panel in row:
            panel.set(xlabel="load, of capacity")
            panel.grid(alpha=0.25)
        kept.yaxis.set_major_formatter(PercentFormatter(1.0))
        short.yaxis.set_major_formatter(PercentFormatter(1.0))
        kept.legend(frameon=False, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
