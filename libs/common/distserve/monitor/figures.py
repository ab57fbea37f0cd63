"""What the gateway sees: who it is, its rates, its latencies, what came of promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from distserve.monitor.fitting import Want
from distserve.monitor.pane import (
    BAD,
    DOUBTFUL,
    GOOD,
    HEADING,
    LEFT,
    QUIET,
    Cell,
    Column,
    Pane,
    grid,
    line,
    status_style,
)
from distserve.monitor.words import age, rate, seconds, share, sparkline
from distserve.status import ClassStatus, ClusterStatus, GatewayStatus, Quantiles

_BREAKER = {"off": QUIET, "closed": GOOD, "half_open": DOUBTFUL}
_LATENCIES = ("ttft", "itl", "tpot", "e2e")
_STAGES = ("queue", "prefill", "transfer", "decode")
_FIXED = 50  # characters of the latency table before the curve
_AROUND = 16  # of what stands beside the curve
_MOST_SECONDS = 60
_ENOUGH, _SOME = 0.99, 0.9  # attainment


def head(status: ClusterStatus) -> Pane:
    """Two lines: who it is and how it stands; how much it does."""
    g = status.gateway
    past = [f"{what} {n}" for n, what in ((g.bus_reconnects, "reconnects"), (g.bus_drops, "drops")) if n]
    first = line(
        (f"DistServe {status.version}", "bold"),
        f"  {status.model}  {g.id} ",
        (g.status, status_style(g.status)),
        "  breaker ",
        (g.breaker, _BREAKER.get(g.breaker, BAD)),
        (f"  {time.strftime('%H:%M:%S', time.localtime(status.at_unix_s))}  up {age(g.uptime_s)}", QUIET),
        ("" if g.bus_connected else "  bus lost", BAD),
        (f"  bus {', '.join(past)}" if past else "", DOUBTFUL),
    )
    routes = "  ".join(f"{kind} {rate(n)}/s" for kind, n in sorted(g.routes_per_s.items()) if n)
    second = line(
        (f"{g.num_live}", "bold"),
        " live  ",
        (rate(g.requests_per_s), "bold"),
        f" req/s, {rate(g.good_requests_per_s)} good, ",
        (f"{rate(g.failed_per_s)} failed", BAD if g.failed_per_s else QUIET),
        "  ",
        (rate(g.tokens_per_s), "bold"),
        " tok/s  ",
        (routes, QUIET),
    )
    return Pane("head", Want(2, 2, 0), lambda lines, width: Group(*(first, second)[:lines]))


def latency(status: ClusterStatus) -> Pane:
    """Quantiles of the last minute, and each second beside them."""
    g, history = status.gateway, status.history
    beside: dict[str, tuple[str, Sequence[float | None], Callable[[float | None], str]]] = {
        "ttft": ("p99", [s.ttft_p99_s for s in history], seconds),
        "itl": ("p99", [s.itl_p99_s for s in history], seconds),
        "tpot": ("tok/s", [float(s.num_tokens) for s in history], rate),
        "e2e": ("live", [float(s.num_live) for s in history], rate),
    }

    def row(name: str, width: int) -> tuple[Cell, ...]:
        room = min(_MOST_SECONDS, width - _FIXED - _AROUND)
        if room <= 0:
            return _quantiles(g, name, name.upper())
        what, values, words = beside[name]
        last = next((v for v in reversed(values) if v is not None), None)
        curve = Text.assemble((f"{what:<6}", QUIET), (sparkline(values, room), "cyan"), f" {words(last)}")
        return *_quantiles(g, name, name.upper()), curve

    def draw(lines: int, width: int) -> RenderableType:
        columns = _columns(f"LAST {age(g.window_s).upper()}")
        if width > _FIXED + _AROUND:
            columns.append(Column("each second", LEFT))
        return grid(columns, [row(name, width) for name in _LATENCIES[: lines - 1]])

    return Pane("latency", Want(4, 1 + len(_LATENCIES), 2), draw)


def stages(status: ClusterStatus) -> Pane:
    """Where that time goes: under the latencies a row each, or a line of medians."""
    g = status.gateway

    def draw(lines: int, width: int) -> RenderableType:
        if lines < len(_STAGES):
            medians = (f"  {name} {seconds(getattr(g, name).p50)}" for name in _STAGES)
            return line(("STAGES p50", HEADING), *medians)
        return grid(_columns(""), [_quantiles(g, name, name, QUIET) for name in _STAGES], headings=False)

    return Pane("stages", Want(1, len(_STAGES), 8), draw)


def _columns(heading: str) -> list[Column]:
    quantiles = [Column(name, "right", 8) for name in ("p50", "p90", "p99")]
    return [Column(heading, LEFT, 10), *quantiles, Column("count", "right", 6)]


def _quantiles(g: GatewayStatus, field: str, name: str, style: str = "") -> tuple[Cell, ...]:
    q: Quantiles = getattr(g, field)
    return Text(name, style), seconds(q.p50), seconds(q.p90), seconds(q.p99), f"{q.count:,}"


def classes(status: ClusterStatus) -> Pane:
    """Promises kept, by priority: a line of it, or a table."""
    found = sorted((name, c) for name, c in status.gateway.classes.items() if c.num_requests or c.num_refused)

    def in_line() -> Text:
        parts: list[tuple[str, str] | str] = [("ATTAINED", HEADING)]
        for name, c in found:
            if not c.num_promised and not c.num_refused:
                continue
            refused = f", {c.num_refused:,} refused" if c.num_refused else ""
            parts += [f"  {name} ", (share(c.attainment), _attained(c)), f" of {c.num_promised:,}{refused}"]
        return line(*parts)

    def draw(lines: int, width: int) -> RenderableType:
        if lines < 1 + len(found):
            return in_line()
        columns = [Column("PRIORITY", LEFT), *map(Column, ("requests", "promised", "attained", "", "refused"))]
        rows = [
            (
                name,
                f"{c.num_requests:,}",
                f"{c.num_promised:,}",
                f"{c.num_attained:,}",
                Text(share(c.attainment), _attained(c)),
                Text(f"{c.num_refused:,}", DOUBTFUL if c.num_refused else ""),
            )
            for name, c in found
        ]
        return grid(columns, rows)

    return Pane("classes", Want(1, 1 + len(found), 6) if found else Want(0, 0, 6), draw)


def _attained(c: ClassStatus) -> str:
    if c.attainment is None:
        return QUIET
    return GOOD if c.attainment >= _ENOUGH else DOUBTFUL if c.attainment >= _SOME else BAD
