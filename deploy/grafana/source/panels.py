"""Panels of Grafana's classic dashboard model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

WIDTH = 24  # columns of a dashboard
SOURCE: Json = {"type": "prometheus", "uid": "prometheus"}

GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"


@dataclass(frozen=True)
class Query:
    """PromQL, and what a series is called (`{{label}}` is filled in)."""

    expr: str
    legend: str = ""
    instant: bool = False
    format: str = "time_series"


@dataclass(frozen=True)
class Panel:
    """Its own JSON, without a place, which it gets in the dashboard: `width` of 24 columns, `height` in rows."""

    json: Json
    width: int
    height: int


def _panel(
    kind: str,
    title: str,
    queries: Sequence[Query],
    *,
    width: int,
    height: int,
    text: str,
    unit: str,
    options: Json,
    custom: Json,
    defaults: Json | None = None,
    overrides: Sequence[Json] = (),
    also: Json | None = None,
) -> Panel:
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": SOURCE,
            "expr": q.expr,
            "legendFormat": q.legend or "__auto",
            "editorMode": "code",
            "range": not q.instant,
            "instant": q.instant,
            "format": q.format,
        }
        for i, q in enumerate(queries)
    ]
    json = {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom, **(defaults or {})}, "overrides": [*overrides]},
        "options": options,
        **(also or {}),
    }
    return Panel(json, width, height)


def steps(*pairs: tuple[float | None, str]) -> Json:
    """(from this value on, colour), the first from None."""
    return {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in pairs]}


def mappings(texts: Mapping[str, tuple[str, str]]) -> list[Json]:
    """value -> (text, colour)"""
    options = {
        value: {"text": text, "color": colour, "index": i} for i, (value, (text, colour)) in enumerate(texts.items())
    }
    return [{"type": "value", "options": options}]


def curves(
    title: str,
    *queries: Query,
    text: str,
    unit: str = "short",
    width: int = 8,
    height: int = 8,
    stacked: bool = False,
    least: float | None = 0,
    most: float | None = None,
    thresholds: Json | None = None,
    logarithmic: bool = False,
) -> Panel:
    """Time series. With thresholds, lines where they are."""
    custom: Json = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 25 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "scaleDistribution": {"type": "log", "log": 10} if logarithmic else {"type": "linear"},
    }
    defaults: Json = {}
    if least is not None and not logarithmic:
        defaults["min"] = least
    if most is not None:
        defaults["max"] = most
    if thresholds is not None:
        custom["thresholdsStyle"] = {"mode": "line"}
        defaults["thresholds"] = thresholds
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return _panel(
        "timeseries",
        title,
        queries,
        width=width,
        height=height,
        text=text,
        unit=unit,
        options=options,
        custom=custom,
        defaults=defaults,
    )


def number(
    title: str,
    expr: str,
    *,
    text: str,
    unit: str = "short",
    width: int = 3,
    height: int = 4,
    thresholds: Json | None = None,
    values: list[Json] | None = None,
    decimals: int | None = None,
) -> Panel:
    """The newest value, large, with its curve behind."""
    defaults: Json = {"thresholds": thresholds or steps((None, BLUE)), "mappings": values or []}
    if decimals is not None:
        defaults["decimals"] = decimals
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "textMode": "auto",
        "orientation": "auto",
    }
    return _panel(
        "stat",
        title,
        [Query(expr)],
        width=width,
        height=height,
        text=text,
        unit=unit,
        options=options,
        custom={},
        defaults={**defaults, "color": {"mode": "thresholds"}},
    )


def gauges(
    title: str, query: Query, *, text: str, unit: str, width: int = 8, height: int = 8, thresholds: Json, most: float
) -> Panel:
    """A bar for each series, the newest value."""
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "horizontal",
        "displayMode": "gradient",
        "showUnfilled": True,
        "valueMode": "color",
    }
    return _panel(
        "bargauge",
        title,
        [query],
        width=width,
        height=height,
        text=text,
        unit=unit,
        options=options,
        custom={},
        defaults={"thresholds": thresholds, "min": 0, "max": most, "color": {"mode": "thresholds"}},
    )


def heatmap(title: str, metric: str, selector: str, *, text: str, width: int = 12, height: int = 8) -> Panel:
    """How often each stretch of a histogram of seconds was hit."""
    expr = f"sum by (le) (increase({metric}_bucket{{{selector}}}[$__rate_interval]))"
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "fill": "dark-orange"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": "s"},
    }
    query = Query(expr, "{{le}}", format="heatmap")
    custom = {"hideFrom": {"legend": False, "tooltip": False, "viz": False}, "scaleDistribution": {"type": "linear"}}
    return _panel(
        "heatmap", title, [query], width=width, height=height, text=text, unit="s", options=options, custom=custom
    )


def table(
    title: str,
    *queries: Query,
    text: str,
    rename: Mapping[str, str],
    width: int = 12,
    height: int = 8,
    overrides: Sequence[Json] = (),
) -> Panel:
    """Instant queries, joined by their labels. `rename`: column -> heading; all others are hidden. A query's own column
    is "Value #A", "Value #B", …; of one query alone "Value"."""
    instant = [Query(q.expr, q.legend, True, "table") for q in queries]
    transformations: list[Json] = [{"id": "merge", "options": {}}] if len(instant) > 1 else []
    transformations += [
        {"id": "filterFieldsByName", "options": {"include": {"names": list(rename)}}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {},
                "indexByName": {name: i for i, name in enumerate(rename)},
                "renameByName": dict(rename),
            },
        },
    ]
    return _panel(
        "table",
        title,
        instant,
        width=width,
        height=height,
        text=text,
        unit="short",
        options={"showHeader": True, "cellHeight": "sm"},
        custom={"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False},
        overrides=overrides,
        also={"transformations": transformations},
    )


def column(name: str, unit: str, texts: Mapping[str, tuple[str, str]] | None = None) -> Json:
    """How a table shows one of its columns."""
    properties: list[Json] = [{"id": "unit", "value": unit}]
    if texts:
        properties += [
            {"id": "mappings", "value": mappings(texts)},
            {"id": "custom.cellOptions", "value": {"type": "color-text"}},
        ]
    return {"matcher": {"id": "byName", "options": name}, "properties": properties}


def words(markdown: str, *, height: int = 5, width: int = WIDTH) -> Panel:
    """Text."""
    json = {
        "type": "text",
        "title": "How to read this",
        "description": "",
        "options": {"mode": "markdown", "content": markdown.strip() + "\n"},
        "fieldConfig": {"defaults": {}, "overrides": []},
    }
    return Panel(json, width, height)
