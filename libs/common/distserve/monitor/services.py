"""Who is there: a line each, by role."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rich.console import RenderableType
from rich.text import Text

from distserve.monitor.fitting import Want
from distserve.monitor.pane import BAD, DOUBTFUL, GOOD, LEFT, QUIET, Cell, Column, Pane, bar, grid, shown, status_style
from distserve.monitor.words import NONE, clean, rate, seconds, share
from distserve.status import ClusterStatus, ServiceStatus

_ROLES = ("gateway", "prefill", "decode", "kvstore")
_BAR = 10
_SHORT = 0.9  # of a pool in use: soon sequences wait for room
_LEAST_ROWS = 5


class _Field(NamedTuple):
    column: Column
    cell: Callable[[ServiceStatus], Cell]
    from_width: int = 0  # of the screen


def _blocks(s: ServiceStatus) -> Cell:
    """Used, then what a prefix is kept in, then empty ones; and the share that is used."""
    if not s.total_blocks:
        return NONE
    used = 1 - s.free_blocks / s.total_blocks
    cached = min(s.cached_blocks, s.free_blocks) / s.total_blocks
    short = used >= _SHORT and s.role != "kvstore"  # a store is full as long as it has something to keep
    drawn = bar(_BAR, (used, "█", BAD if short else GOOD), (cached, "▒", "blue"))
    return drawn.append(f" {share(used):>6}")


def _status(s: ServiceStatus) -> Cell:
    return Text(clean(s.status), status_style(s.status)) if s.reached else Text("silent", BAD)


_FIELDS = (
    _Field(Column("SERVICE", LEFT), lambda s: s.id),
    _Field(Column("role", LEFT), lambda s: s.role),
    _Field(Column("status", LEFT), _status),
    _Field(Column("run"), lambda s: f"{s.num_running:,}"),
    _Field(Column("wait"), lambda s: Text(f"{s.num_waiting:,}", DOUBTFUL if s.num_waiting else "")),
    _Field(Column("blocks in use", LEFT), _blocks),
    _Field(Column("tok/s"), lambda s: rate(s.tokens_per_s)),
    _Field(Column("KV hit"), lambda s: share(s.kv_hit_rate)),
    _Field(Column("step"), lambda s: seconds(s.step_s), 92),
    _Field(Column("batch"), lambda s: rate(s.mean_batch), 100),
    _Field(Column("waiting tok"), lambda s: f"{s.num_waiting_tokens:,}", 112),
    _Field(Column("preempt/s"), lambda s: rate(s.preemptions_per_s), 124),
    _Field(Column("GPU"), lambda s: share(s.gpu_util), 132),
    _Field(Column("transports", LEFT), lambda s: ", ".join(s.transports_in_use) or NONE, 146),
    _Field(Column("host", LEFT), lambda s: s.host or NONE, 166),
    _Field(Column("version", LEFT), lambda s: s.version or NONE, 178),
)


def services(status: ClusterStatus) -> Pane:
    found = sorted(status.services, key=lambda s: (_ROLES.index(s.role) if s.role in _ROLES else 9, s.id))

    def draw(lines: int, width: int) -> RenderableType:
        fields = [f for f in _FIELDS if f.from_width <= width]
        rows = [tuple(f.cell(s) for f in fields) for s in found]
        matters = [not s.reached or s.status != "ok" for s in found]
        if not rows:
            rows = [(Text("nobody is registered", QUIET),)]
        return grid([f.column for f in fields], shown(rows, lines - 1, matters))

    num = max(1, len(found))
    return Pane("services", Want(1 + min(num, _LEAST_ROWS), 1 + num, 3), draw)
