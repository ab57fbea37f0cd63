"""Findings as a table for people and as a document for machines."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from distserve import __version__
from distserve.console import Console
from distserve.doctor.finding import STATUSES, Finding, Status

FORMAT = 1  # of the JSON document; grows when a key changes its meaning or goes

TITLES = {
    "rdma": "RDMA",
    "network": "Marks and queues",
    "host": "Host",
    "ports": "Ports",
    "nats": "NATS",
    "clock": "Clocks",
    "peer": "Peer",
}
_COLOURS: Mapping[Status, int] = {"ok": 32, "warn": 33, "fail": 31, "skip": 2}
_MIN_WIDTH, _MAX_WIDTH = 60, 120
_INDENT = 8  # "  warn  "


def exit_status(findings: Sequence[Finding]) -> int:
    """1 if anything failed, else 0."""
    return int(any(f.status == "fail" for f in findings))


def as_document(
    findings: Sequence[Finding], *, host: str, kind: str, bus: str, peer: str, unix_s: float
) -> dict[str, Any]:
    """One JSON object; docs/doctor.md describes its keys."""
    counts = Counter(f.status for f in findings)
    return {
        "format": FORMAT,
        "version": __version__,
        "host": host,
        "unix_s": unix_s,
        "transport_kind": kind,
        "bus": bus,
        "peer": peer or None,
        "summary": {status: counts[status] for status in STATUSES},
        "findings": [
            {
                "check": f.check,
                "subject": f.subject or None,
                "status": f.status,
                "found": f.found,
                "mend": f.mend.splitlines(),
                "measures": dict(f.measures),
            }
            for f in findings
        ],
    }


def print_table(findings: Sequence[Finding], console: Console, width: int) -> None:
    """Grouped, a line a finding and below it what mends it. Checks of a group that were left out for one reason share a
    line. width: of the terminal, columns; commands are never broken."""
    width = max(_MIN_WIDTH, min(_MAX_WIDTH, width))
    for group, title in TITLES.items():
        rows = _merged([f for f in findings if f.group == group])
        if not rows:
            continue
        console.say()
        console.say(console.bold(title))
        for row in rows:
            _print_row(row, console, width)
    counts = Counter(f.status for f in findings)
    console.say()
    console.say(", ".join(f"{counts[status]} {status}" for status in STATUSES))


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Skips with one reason and nothing to mend become one row, where the first of them stood."""
    names: dict[str, list[str]] = {}
    for f in findings:
        if f.status == "skip" and not f.mend:
            names.setdefault(f.found, []).append(f.name)
    rows: list[Finding] = []
    for f in findings:
        if f.status != "skip" or f.mend or len(together := names.pop(f.found, [])) == 1:
            rows.append(f)
        elif together:
            name = ", ".join(dict.fromkeys(together))
            rows.append(Finding(f"{f.group}.{name}", "skip", f.found))
    return rows


def _print_row(row: Finding, console: Console, width: int) -> None:
    name = row.name + (f" {row.subject}" if row.subject else "")
    lines = textwrap.wrap(
        f"{name}: {row.found}",
        width - _INDENT,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    status = console.paint(f"{row.status:<4}", _COLOURS[row.status])
    first, *rest = lines
    if first.startswith(name):
        first = (console.dim(name) if row.status == "skip" else console.bold(name)) + first[len(name) :]
    console.say(f"  {status}  {first}")
    for line in rest:
        console.say(" " * _INDENT + line)
    for line in row.mend.splitlines():
        command, _, remark = line.partition("  # ")
        short = f"{' ' * _INDENT}  -> {line}"
        if len(short) <= width or not remark:
            console.say(short if not line.startswith("#") else f"{' ' * _INDENT}  -> {line.lstrip('# ')}")
        else:
            console.say(f"{' ' * _INDENT}  -> {command}")
            console.say(f"{' ' * _INDENT}     # {remark}")
