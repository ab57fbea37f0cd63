"""Throughput of stores as tables: cells, medians of rounds, ratios within rounds, CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.load_stats import Spread, ratios
from benchmarks.store_values import MIB

OURS = "DistServe, "


@dataclass(frozen=True, slots=True)
class Cell:
    """One side's put or get of one size in one round. CPU in seconds: of the driver, of the servers; `others`: cores
    that everyone else used meanwhile."""

    side: str
    size: str
    verb: str
    turn: int
    num_bytes: int
    seconds: float
    client_s: float
    server_s: float
    others: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class Failure:
    side: str
    size: str
    why: str


def tables(cells: Sequence[Cell], failures: Sequence[Failure]) -> str:
    sizes, sides = _seen(c.size for c in cells), _seen(c.side for c in cells)
    parts = []
    for verb in ("put", "get"):
        rows = [[side, *(_speed(cells, side, size, verb) for size in sizes)] for side in sides]
        parts.append(markdown([f"{verb}, GB/s", *sizes], rows))
    rows = [[side, *(_cpu(cells, side, size) for size in sizes)] for side in sides]
    parts.append(markdown(["CPU us a MiB put and got, client + servers", *sizes], rows))
    rivals = [side for side in sides if not side.startswith(OURS)]
    for ours in (side for side in sides if side.startswith(OURS)):
        rows = [
            [f"{verb}, of {rival}", *(_ratio(cells, ours, rival, size, verb) for size in sizes)]
            for rival in rivals
            for verb in ("put", "get")
            if (rival == "disk") == ours.endswith("disk")
        ]
        parts.append(markdown([ours, *sizes], rows))
    parts += [f"{f.side} at {f.size} failed: {f.why}" for f in failures]
    return "\n\n".join(parts)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _of(cells: Sequence[Cell], side: str, size: str, verb: str) -> dict[int, float]:
    """GB/s by turn."""
    return {c.turn: c.gb_per_s for c in cells if (c.side, c.size, c.verb) == (side, size, verb)}


def _speed(cells: Sequence[Cell], side: str, size: str, verb: str) -> str:
    return Spread.of(_of(cells, side, size, verb).values()).text(2)


def _ratio(cells: Sequence[Cell], ours: str, rival: str, size: str, verb: str) -> str:
    return ratios(_of(cells, ours, size, verb), _of(cells, rival, size, verb)).text(2)


def _cpu(cells: Sequence[Cell], side: str, size: str) -> str:
    """Over all rounds together: the kernel counts in hundredths of a second."""
    found = [c for c in cells if (c.side, c.size) == (side, size)]
    mib = sum(c.num_bytes for c in found) / MIB
    if not mib:
        return "-"
    client, server = (
        1e6 * sum(values) / mib for values in zip(*((c.client_s, c.server_s) for c in found), strict=True)
    )
    return f"{client:,.0f} + {server:,.0f}"


def _seen(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
