"""Draws a Grafana dashboard's JSON with Matplotlib, each query put to a Prometheus."""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

Json = dict[str, Any]
Ask = Callable[..., Any]

_COLUMN_IN, _ROW_IN = 0.62, 0.3  # of Grafana's grid
_STEP_S = 5
_INK, _QUIET, _LINE = "#24292e", "#6e7781", "#d0d7de"
_COLOURS = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
)
_NAMED = {"green": "#1a7f37", "yellow": "#9a6700", "red": "#cf222e", "blue": "#0969da"}


def draw(board: Json, prometheus: Any, since_unix_s: float, file: Path) -> None:
    """`prometheus`: has get(path, **parameters) of its API."""
    panels = board["panels"]
    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    width, height = 24 * _COLUMN_IN, rows * _ROW_IN
    figure = plt.figure(figsize=(width, height), dpi=90)
    until = time.time()

    def ask(target: Json) -> list[Json]:
        expr = target["expr"].replace("$__rate_interval", "30s")
        expr = re.sub(r"\$(model|worker|node)", ".*", expr)
        if target["instant"]:
            found: list[Json] = prometheus.get("query", query=expr)["result"]
        else:
            span = {"start": f"{since_unix_s}", "end": f"{until}", "step": f"{_STEP_S}"}
            found = prometheus.get("query_range", query=expr, **span)["result"]
        return found

    for panel in panels:
        at = panel["gridPos"]
        left, top = at["x"] / 24, 1 - at["y"] / rows
        wide, tall = at["w"] / 24, at["h"] / rows
        if panel["type"] == "row":
            figure.text(left + 0.004, top - tall * 0.65, panel["title"], fontsize=11, weight="bold", color=_INK)
            continue
        px, py = 0.041, 0.9 / height  # for axes and titles
        inner = (left + px, top - tall + py * 0.62, wide - px - 0.012, tall - py * 1.02)
        axes = figure.add_axes(inner)
        figure.text(left + 0.006, top - 0.22 / height, panel["title"], fontsize=9, color=_INK, weight="bold")
        _KINDS[panel["type"]](axes, panel, ask)
    figure.savefig(file, facecolor="white")
    plt.close(figure)


def _curves(axes: Axes, panel: Json, ask: Ask) -> None:
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    below: dict[float, float] = {}
    num = 0
    for target in panel["targets"]:
        for series in ask(target):
            points = [(t, float(v)) for t, v in series["values"] if math.isfinite(float(v))]
            if stacked:
                points = [(t, v + below.get(t, 0.0)) for t, v in points]
            colour = _COLOURS[num % len(_COLOURS)]
            times, values = [t for t, _ in points], [v for _, v in points]
            if stacked and points:
                axes.fill_between(
                    times, [below.get(t, 0.0) for t in times], values, color=colour, alpha=0.35, linewidth=0
                )
                below |= dict(points)
            axes.plot(times, values, color=colour, linewidth=1, label=_legend(target, series))
            num += 1
    _plain(axes, panel)
    if not num:
        axes.set_xticks([])
        _none(axes)
    elif num <= 12:
        axes.legend(fontsize=6, loc="upper left", ncols=1 + num // 5, frameon=False, labelspacing=0.2)
    if panel["fieldConfig"]["defaults"]["custom"]["scaleDistribution"]["type"] == "log":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0, top=panel["fieldConfig"]["defaults"].get("max"))
        axes.margins(y=0.3)


def _number(axes: Axes, panel: Json, ask: Ask) -> None:
    axes.axis("off")
    found = ask(panel["targets"][0])
    values = [float(v) for _, v in found[0]["values"]] if found else []
    value = next((v for v in reversed(values) if math.isfinite(v)), None)
    defaults = panel["fieldConfig"]["defaults"]
    colour = _colour(defaults, value)
    texts = {k: v["text"] for m in defaults.get("mappings", ()) for k, v in m["options"].items()}
    text = "-" if value is None else texts.get(f"{value:g}") or _unit(value, defaults["unit"])
    if len(values) > 1 and not texts:
        axes.fill_between(range(len(values)), values, color=colour, alpha=0.15)
        axes.set_ylim(0, max(v for v in [*values, 0] if math.isfinite(v)) * 2 or 1)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=17, color=colour)


def _bars(axes: Axes, panel: Json, ask: Ask) -> None:
    target = panel["targets"][0]
    found = ask(target)
    defaults = panel["fieldConfig"]["defaults"]
    for i, series in enumerate(found):
        value = float(series["values"][-1][1])
        axes.barh(i, defaults["max"], color="#eaeef2")
        axes.barh(i, value, color=_colour(defaults, value))
        axes.text(0.01, i, f"{_legend(target, series)}  {_unit(value, defaults['unit'])}", va="center", fontsize=8)
    axes.axis("off")


def _heat(axes: Axes, panel: Json, ask: Ask) -> None:
    found = [s for s in ask(panel["targets"][0]) if s["metric"]["le"] != "+Inf"]
    found.sort(key=lambda s: float(s["metric"]["le"]))
    if not found:
        _none(axes)
        return
    times = sorted({t for s in found for t, _ in s["values"]})
    rows = [[dict(s["values"]).get(t, "nan") for t in times] for s in found]
    counts = [[float(v) for v in row] for row in rows]
    steps = [counts[0]] + [[b - a for a, b in zip(low, high, strict=True)] for low, high in pairwise(counts)]
    grid = [[v if v > 0 else math.nan for v in row] for row in steps]
    bounds = [float(s["metric"]["le"]) for s in found]
    axes.pcolormesh(times, [bounds[0] / 2, *bounds][1:], grid, cmap="Oranges", shading="nearest")
    axes.set_yscale("log")
    _plain(axes, panel)
    axes.set_ylim(*_hit(bounds, grid))


def _hit(bounds: list[float], grid: list[list[float]]) -> tuple[float, float]:
    hit = [bound for bound, row in zip(bounds, grid, strict=True) if any(v > 0 for v in row)]
    return (min(hit) / 2, max(hit) * 2) if hit else (bounds[0], bounds[-1])


def _table(axes: Axes, panel: Json, ask: Ask) -> None:
    axes.axis("off")
    names: dict[str, str] = panel["transformations"][-1]["options"]["renameByName"]
    several = len(panel["targets"]) > 1
    rows: dict[str, Json] = {}
    for i, target in enumerate(panel["targets"]):
        for series in ask(target):
            row = rows.setdefault(series["metric"].get("instance", "") or str(series["metric"]), {})
            row |= series["metric"]
            row[f"Value #{chr(65 + i)}" if several else "Value"] = series["value"][1]
    if not rows:
        _none(axes)
        return
    overrides = {o["matcher"]["options"]: o["properties"] for o in panel["fieldConfig"]["overrides"]}

    def cell(row: Json, name: str) -> str:
        value = str(row.get(name, ""))
        for prop in overrides.get(names[name], ()):
            if prop["id"] == "mappings":
                value = {k: v["text"] for m in prop["value"] for k, v in m["options"].items()}.get(value, value)
        return value

    texts = [[cell(row, name) for name in names] for row in rows.values()]
    shown = axes.table(texts, colLabels=list(names.values()), loc="upper left", cellLoc="left", edges="horizontal")
    shown.auto_set_font_size(False)
    shown.set_fontsize(7)
    shown.auto_set_column_width(list(range(len(names))))


def _words(axes: Axes, panel: Json, ask: Ask) -> None:
    axes.axis("off")
    text = re.sub(r"[*`]", "", panel["options"]["content"]).replace("\n", " ")
    axes.text(-0.03, 1.0, textwrap.fill(text, 225), transform=axes.transAxes, va="top", fontsize=8, color=_INK)


_KINDS: dict[str, Callable[[Axes, Json, Ask], None]] = {
    "timeseries": _curves,
    "stat": _number,
    "bargauge": _bars,
    "heatmap": _heat,
    "table": _table,
    "text": _words,
}


def _none(axes: Axes) -> None:
    axes.text(0.5, 0.5, "nothing", transform=axes.transAxes, ha="center", va="center", fontsize=9, color=_QUIET)


def _plain(axes: Axes, panel: Json) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.grid(color=_LINE, linewidth=0.5)
    axes.tick_params(labelsize=6.5, colors=_QUIET)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _unit(v, unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: time.strftime("%H:%M:%S", time.gmtime(t))))
    axes.locator_params(axis="x", nbins=5)
    for side in axes.spines.values():
        side.set_color(_LINE)


def _legend(target: Json, series: Json) -> str:
    text: str = target["legendFormat"]
    if text == "__auto":
        return ", ".join(series["metric"].values())
    return re.sub(r"\{\{(\w+)\}\}", lambda m: series["metric"].get(m[1], ""), text)


def _colour(defaults: Json, value: float | None) -> str:
    found = "blue"
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is None or (value is not None and value >= step["value"]):
            found = step["color"]
    return _NAMED[found]


def _unit(value: float, unit: str) -> str:
    match unit:
        case "s":
            return f"{value:.3g} s" if abs(value) >= 1 or value == 0 else f"{value * 1e3:.3g} ms"
        case "percentunit":
            return f"{100 * value:.3g} %"
        case "bytes" | "Bps":
            for prefix in ("", "K", "M", "G"):
                if abs(value) < 1024 or prefix == "G":
                    return f"{value:.3g} {prefix}{'i' if prefix else ''}B{'/s' if unit == 'Bps' else ''}"
                value /= 1024
    words = {"reqps": " req/s", "ops": "/s"}.get(unit, "")
    if unit.startswith("suffix:"):
        words = unit.removeprefix("suffix:")
    return f"{value:,.0f}{words}" if abs(value) >= 1000 else f"{value:.3g}{words}"
