"""The report as one page: no file beside it, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from distserve.bench import charts
from distserve.bench.document import Document, Side
from distserve.bench.summary import QUANTILES, Quantile
from distserve.bench.text import (
    TITLES,
    lengths_in_words,
    notes,
    rates_in_words,
    ratio_row,
    requests_in_words,
    use_in_words,
)
from distserve.bench.units import in_ms, plain

_STYLE = """
:root { color-scheme: light; --ink: #1c2733; --soft: #5b6875; --line: #dde3e9; --tint: #f5f7f9; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 28px 24px 60px; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 2px; }
h2 { font-size: 18px; margin: 36px 0 8px; border-bottom: 1px solid var(--line); padding-bottom: 4px; }
p.soft, td.soft, .soft { color: var(--soft); }
p { margin: 4px 0; }
.figures { display: flex; flex-wrap: wrap; gap: 12px; margin: 14px 0; }
.figure { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; flex: 1 1 130px; }
.figure b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.figure span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; margin: 10px 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; color: var(--soft); }
td small { color: var(--soft); display: block; font-size: 12px; }
table.facts td { text-align: left; }
table.facts td:first-child { color: var(--soft); white-space: nowrap; }
pre { background: var(--tint); padding: 10px 12px; border-radius: 6px; overflow-x: auto; font-size: 13px; margin: 0; }
.warning { border-left: 4px solid #d08b00; background: #fdf6e6; padding: 8px 14px; margin: 8px 0; }
svg { width: 100%; height: auto; display: block; margin: 8px 0; }
"""


def page(document: Document) -> str:
    """HTML."""
    heading = " and ".join(f"{side.server.model} at {side.server.url}" for side in document.sides)
    parts = [
        f"<h1>{escape(heading)}</h1>",
        f'<p class="soft">{escape(document.traffic)}. Began {escape(document.began)}.</p>',
        *(f'<div class="warning">{escape(text)}</div>' for text in document.warnings),
    ]
    if document.ratios:
        head = ("", "A", "B", "B / A", "95 % interval")
        parts += ["<h2>B over A</h2>", _table(head, [[escape(c) for c in ratio_row(r)] for r in document.ratios])]
        parts.append(
            '<p class="soft">Interleaved slices of the same traffic; intervals by a bootstrap over slices.</p>'
        )
    for side in document.sides:
        parts += _side(document, side)
    pictures = charts.pictures(document)
    for title in ("Latency", "Over time"):
        parts += [f"<h2>{title}</h2>", pictures[title]]
    for side in document.sides:
        parts += [f"<h2>{_named('Requests', side)}</h2>", _picked(document, side), pictures[side.name]]
    parts += ["<h2>Conditions</h2>", *_conditions(document)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _side(document: Document, side: Side) -> Iterable[str]:
    s = side.summary
    yield f"<h2>{_named('Figures', side)}</h2>"
    figures = [(plain(s.output_tokens_per_s), "output tokens/s"), (plain(s.requests_per_s), "requests/s")]
    for name, label in (("ttft", "ms to the first token, P50"), ("itl", "ms between tokens, P50")):
        p50 = s.latencies[name].quantiles["p50"].value_s
        figures.append(("n/a" if p50 is None else in_ms(p50), label))
    if s.good_share is not None:
        slo = ", ".join(f"{name} {in_ms(limit)} ms" for name, limit in document.slo.items())
        figures.append((f"{s.good_share:.1%}", f"within {slo}"))
    figures.append((f"{s.num_requests - s.num_ok}", f"of {s.num_requests} requests failed"))
    boxes = "".join(f'<div class="figure"><b>{escape(v)}</b><span>{escape(label)}</span></div>' for v, label in figures)
    yield f'<div class="figures">{boxes}</div>'
    for words in (requests_in_words(s), rates_in_words(s), [lengths_in_words(side)]):
        yield f"<p>{escape('; '.join(words))}.</p>"
    if s.failures:
        rows = [[escape(kind), str(f.num), escape(f.example)] for kind, f in s.failures.items()]
        yield _table(("what went wrong", "times", "an example"), rows)
    latency = []
    for name, d in s.latencies.items():
        mean = "n/a" if d.mean_s is None else in_ms(d.mean_s)
        latency.append([escape(TITLES[name]), *map(_cell, d.quantiles.values()), mean, f"{d.num:,}"])
    yield _table(("ms", *(name.upper() for name in QUANTILES), "mean", "samples"), latency)
    yield f'<p class="soft">{escape("; ".join(["below each: its 95 % interval", *notes(s)[1:]]))}.</p>'


def _cell(q: Quantile) -> str:
    if q.value_s is None:
        return f"n/a<small>needs at least {q.needs:,} samples</small>"
    interval = "" if q.low_s is None or q.high_s is None else f"<small>{in_ms(q.low_s)} to {in_ms(q.high_s)}</small>"
    return in_ms(q.value_s) + interval


def _picked(document: Document, side: Side) -> str:
    num, shown = side.summary.num_requests, len(charts.rows(document.of(side)))
    return f'<p class="soft">{shown} of {num:,}, evenly picked.</p>' if shown < num else ""


def _conditions(document: Document) -> Iterable[str]:
    client = document.client
    facts: dict[str, Any] = {
        "traffic": document.traffic,
        "client": f"distserve {client.version}, Python {client.python}, event loop {client.loop}",
        "client's use": "; ".join(use_in_words(document)),
    }
    if client.floor is not None:
        floor = client.floor
        facts["client alone"] = (
            f"{floor.concurrency} streams: first token {in_ms(floor.ttft_p50_s)} ms (P50), "
            f"{in_ms(floor.ttft_p99_s)} ms (P99); {plain(floor.events_per_s)} events/s; "
            f"{floor.cpu_us_per_event:.1f} us of CPU an event"
        )
    facts |= {f"client's {name}": value for name, value in client.hardware.items()}
    facts["options"] = client.options
    yield _facts(facts)
    for side in document.sides:
        yield f"<h2>{_named('Server', side)}</h2>"
        server = side.server
        yield _facts(
            {
                "URL": f"{server.url}{server.endpoint}",
                "model": server.model,
                "lengths": server.lengths_by,
                "fields it refuses": ", ".join(server.dropped) or "none",
                **server.facts,
            }
        )


def _facts(facts: Mapping[str, Any]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, str):
            return escape(value)
        return f"<pre>{escape(json.dumps(msgspec.to_builtins(value), indent=2))}</pre>"

    rows = "".join(f"<tr><td>{escape(name)}</td><td>{shown(value)}</td></tr>" for name, value in facts.items())
    return f'<table class="facts">{rows}</table>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already; headings are text."""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{body}</table>"


def _named(what: str, side: Side) -> str:
    return escape(f"{what}: {side.name}, {side.server.model} at {side.server.url}") if side.name else escape(what)
