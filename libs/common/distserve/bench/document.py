"""What one measurement found: the document that `--json` writes and the table and the page are made of."""

from __future__ import annotations

from typing import Any

import msgspec

from distserve.bench.answers import Result
from distserve.bench.client_use import ClientUse
from distserve.bench.floor import Floor
from distserve.bench.server import ServerInfo
from distserve.bench.summary import Summary, Window

FORMAT = 1  # grows when a key changes its meaning or goes


class ClientInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`options`: of the command, secrets left out. `loop`: whose event loop."""

    version: str
    python: str
    loop: str
    hardware: dict[str, str]
    options: dict[str, Any]
    use: ClientUse
    floor: Floor | None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One server's part. `windows`: stretches in which it was measured, s since the measurement began."""

    name: str
    server: ServerInfo
    windows: list[Window]
    summary: Summary


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """B's figure over A's, with its 95 % interval; None where it can't be said."""

    figure: str
    a: float | None
    b: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """`ratios`: of a comparison. `results`: every request, of all sides, the warm-up's too."""

    format: int = FORMAT
    began: str  # UTC
    traffic: str
    is_open: bool
    slo: dict[str, float]  # s
    client: ClientInfo
    sides: list[Side]
    warnings: list[str]
    ratios: list[Ratio] = []
    results: list[Result]

    def of(self, side: Side) -> list[Result]:
        return [r for r in self.results if r.server == side.name]
