"""A dashboard in Grafana's classic model, schema 39: Grafana 11 and 12 read it as it is, later ones convert it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from panels import RED, SOURCE, WIDTH, Json, Panel

SCHEMA = 39


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Variable:
    """Values of a label that the dashboard can be kept to. All of them is `.*`: series without the label too."""

    name: str
    label: str
    query: str  # label_values(…)


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    text: str
    rows: Sequence[Row]
    variables: Sequence[Variable]
    first: Sequence[Panel] = ()  # above the first row

    def json(self) -> Json:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.text,
            "tags": ["distserve"],
            "schemaVersion": SCHEMA,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "fiscalYearStartMonth": 0,
            "weekStart": "",
            "liveNow": False,
            "links": [_links()],
            "annotations": {"list": [_alerts()]},
            "templating": {"list": [_variable(v) for v in self.variables]},
            "panels": list(_placed(self.first, self.rows)),
        }


def _placed(first: Sequence[Panel], rows: Sequence[Row]) -> Iterable[Json]:
    number, y = 1, 0
    for row in (Row("", first), *rows):
        if row.title:
            place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
            yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
            number, y = number + 1, y + 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            yield {"id": number, **panel.json, "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y}}
            number, x, tallest = number + 1, x + panel.width, max(tallest, panel.height)
        y += tallest


def _variable(v: Variable) -> Json:
    return {
        "name": v.name,
        "label": v.label,
        "type": "query",
        "datasource": SOURCE,
        "definition": v.query,
        "query": {"query": v.query, "refId": f"Variable-{v.name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "options": [],
        "regex": "",
        "skipUrlSync": False,
    }


def _links() -> Json:
    return {
        "type": "dashboards",
        "title": "DistServe",
        "tags": ["distserve"],
        "asDropdown": False,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }


def _alerts() -> Json:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": RED,
        "expr": 'ALERTS{alertname=~"DistServe.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{job}} {{instance}} {{model}}",
        "step": "30s",
    }
