"""One cell: one server, one case, one round; measured again, a few times at most, when others used the cores."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.load import Case, Figures, draw_prompts, measure
from benchmarks.load_cpu import Meter
from benchmarks.load_server import Server
from benchmarks.load_stats import Spread, percentile, quiet_rounds, ratios

OTHERS_LIMIT = 0.1  # cores that others may use in a cell that counts
TRIES = 3
WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """`server_cores`, `idle_cores`, `client_cores`, `other_cores`: in use on average, by the server at work, by those
    that wait for their turn, by the client, by everybody else."""

    server: str
    case: Case
    round: int
    figures: Figures
    server_cores: float
    idle_cores: float
    client_cores: float
    other_cores: float
    tries: int

    @property
    def foreign(self) -> float:
        """Cores that were not at the disposal of the server and its client."""
        return self.other_cores + self.idle_cores

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        figures = row.pop("figures")
        figures.pop("gaps_s")
        row |= {"itl_p99_s": self.figures.itl_p99, "tokens_per_s": figures.pop("tokens_per_s")}
        return row | {name: [round(v, 5) for v in values] for name, values in figures.items()}


def measure_cell(
    server: Server,
    idle: Sequence[Server],
    case: Case,
    number: int,
    *,
    rng: random.Random,
    vocab_size: int,
    breathe: Callable[[], None],
) -> Cell:
    """The quietest of up to TRIES runs, the first below OTHERS_LIMIT. A short request goes before: the first after a
    pause finds other servers' weights in the caches. `breathe` is called before each run (Turns.alone)."""
    best: Cell | None = None
    warm = Case(streams=1, prompt=case.prompt, output=WARM_TOKENS, requests=1)
    for tries in range(1, TRIES + 1):
        breathe()
        measure(server.port, warm, draw_prompts(rng, warm, vocab_size))
        prompts = draw_prompts(rng, case, vocab_size)
        meter = Meter({"server": [server.pid], "idle": [s.pid for s in idle]}, alone={"client": os.getpid()})
        found = measure(server.port, case, prompts)
        used = meter.used()
        cell = Cell(
            server.name,
            case,
            number,
            found,
            server_cores=used.by["server"],
            idle_cores=used.by["idle"],
            client_cores=used.by["client"],
            other_cores=used.others,
            tries=tries,
        )
        if best is None or cell.foreign < best.foreign:
            best = cell
        if cell.foreign <= OTHERS_LIMIT:
            break
    assert best is not None
    return best


def say(cell: Cell) -> None:
    """A line of progress."""
    f = cell.figures
    print(
        f"round {cell.round}  {cell.case!s:>12}  {cell.server:<14} {f.tokens_per_s:7.1f} tokens/s  "
        f"TTFT {1e3 * f.ttft_p50:7.1f} ms  TPOT {1e3 * f.tpot_p50:6.1f} ms  cores: server {cell.server_cores:.2f}, "
        f"client {cell.client_cores:.2f}, idle {cell.idle_cores:.2f}, others {cell.other_cores:.2f}"
        f"{f'  (try {cell.tries})' if cell.tries > 1 else ''}",
        file=sys.stderr,
        flush=True,
    )


@dataclass(frozen=True, slots=True)
class Series:
    """The cells of one server and one case, by round; only those that count."""

    cells: Mapping[int, Cell]
    quiet: bool

    @classmethod
    def of(cls, cells: Sequence[Cell], server: str, case: Case) -> Series:
        mine = {c.round: c for c in cells if c.server == server and c.case == case}
        kept = quiet_rounds({r: c.foreign for r, c in mine.items()}, OTHERS_LIMIT)
        return cls({r: mine[r] for r in sorted(kept.rounds)}, kept.quiet)

    def by_round(self, figure: str) -> dict[int, float]:
        """`figure`: a property of Figures that is one number."""
        return {r: float(getattr(cell.figures, figure)) for r, cell in self.cells.items()}

    def spread(self, figure: str, scale: float = 1.0) -> Spread:
        return Spread.of(scale * v for v in self.by_round(figure).values())

    def pooled(self, values: str, percent: float) -> float:
        """A percentile over the requests (or gaps) of all rounds. `values`: a list of Figures."""
        return percentile((v for c in self.cells.values() for v in getattr(c.figures, values)), percent)

    def ratio(self, other: Series, figure: str) -> Spread:
        return ratios(self.by_round(figure), other.by_round(figure))
