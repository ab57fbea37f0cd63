r"""What long prompts do to answers that are under way: prefill apart from decode, beside both in one process.

    python -m benchmarks.interference [--quick] [--rounds 1] [--every 8 6 4 2] [--sides ...] [--json FILE]
    python -m benchmarks.interference --sides apart colocated --model FOLDER --streams 32 --long 8192 --every 0.5 \
        --set model.device=cuda --set prefill.mps_percentage=70 ...     # on a GPU

Eight answers (32 tokens in, 256 out) run at any time, each replaced as it ends; every 2 s a prompt of 2,048 tokens
comes (1 to 8 tokens out), whether or not the last is done. Measured: a window of 40 s after 8 s, once without long
prompts and once with them at each of some rates. The sides, all up at once and in turn, in an order that is drawn:
`apart` (a prefill and a decode worker, half of the cores each), `colocated` (one worker on all), `vllm` (its defaults)
and `vllm-256` (chunks of 256 tokens).

ITL: pauses between two events of a steady answer. A run in which long prompts queue up without end is marked with `!`:
its TTFT says how long it was watched, no more. A `*` marks one in which others used more than 0.1 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engine_vs_vllm import READY_S, SIDES, start, vocab_size
from benchmarks.interference_load import Mixed, Plan, run
from benchmarks.interference_report import report
from benchmarks.load import Case, draw_prompts, measure
from benchmarks.load_cells import OTHERS_LIMIT
from benchmarks.load_cpu import Meter, conditions
from benchmarks.load_server import Server, orderly_end
from benchmarks.load_turns import Turns
from benchmarks.peers import vllm
from distserve.models import resolve

EVERY_S = (8.0, 6.0, 4.0, 2.0)


@dataclass(frozen=True, slots=True)
class Cell:
    """One window of one side. `every_s`: None without long prompts; `other_cores`: used by neither side nor client."""

    side: str
    every_s: float | None
    round: int
    mixed: Mixed
    server_cores: float
    other_cores: float

    @property
    def quiet(self) -> bool:
        return self.other_cores <= OTHERS_LIMIT

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        row |= row.pop("mixed")
        row["num_gaps"] = len(row.pop("gaps_s"))
        return row | {"itl_p99_s": self.mixed.itl_p99, "grows": self.mixed.grows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="catalogue name or folder, in bf16")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=None, help="default: all; with --quick ours")
    parser.add_argument("--every", type=float, nargs="+", default=None, help="seconds between long prompts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--window", type=float, default=40.0, help="seconds that are measured")
    parser.add_argument("--streams", type=int, default=Plan.streams, help="steady answers at any time")
    parser.add_argument("--prompt", type=int, default=Plan.prompt, help="tokens of their prompts")
    parser.add_argument("--long", type=int, default=Plan.long_prompt, help="tokens of a long prompt")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="KEY=VALUE, of ours")
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: ours alone, one rate, 10 s")
    parser.add_argument("--venv", type=Path, default=vllm.default_venv(), help="where vLLM is or will be installed")
    parser.add_argument("--lock", type=Path, help="a file to hold (flock) while something is measured")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs there")
    parser.add_argument("--json", type=Path, help="write every window there too")
    a = parser.parse_args()
    a.sides = a.sides or list(SIDES[:2] if a.quick else SIDES)
    a.every = a.every or list(EVERY_S[2:3] if a.quick else EVERY_S)
    sizes = {"streams": a.streams, "prompt": a.prompt, "long_prompt": a.long}
    plans = [Plan(every_s, a.window, **sizes) for every_s in (None, *sorted(a.every, reverse=True))]
    if a.quick:
        plans = [replace(p, window_s=10.0, warm_s=3.0, drain_s=15.0) for p in plans]
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as scratch, orderly_end():
        try:
            measure_all(a, plans, a.logs or Path(scratch), cells)
        finally:  # what was measured until Ctrl-C is not lost
            if cells:
                rows = [cell.as_json() for cell in cells]
                print(report(rows))
                if a.json:
                    a.json.write_text(json.dumps({"conditions": conditions(), "cells": rows}, indent=1))


def measure_all(a: argparse.Namespace, plans: Sequence[Plan], logs: Path, cells: list[Cell]) -> None:
    model = Path(resolve(a.model))
    turns = Turns(a.lock)
    python = vllm.install(a.venv) if any("vllm" in side for side in a.sides) else Path()
    rng, vocab = random.Random(), vocab_size(model)
    with ExitStack() as stack:
        servers = []
        for side in a.sides:
            with turns.beside_others():
                server = stack.enter_context(start(side, model, python, logs, None, a.settings))
                server.wait_ready(vllm.READY_S if "vllm" in side else READY_S)
                # Nobody pays for what is done only once.
                for case in (Case(a.streams, a.prompt, 8, a.streams), Case(1, a.long, 8, 1)):
                    measure(server.port, case, draw_prompts(rng, case, vocab))
            servers.append(server)
            print(f"{side} is ready", file=sys.stderr, flush=True)
        for number in range(1, a.rounds + 1):
            for plan in plans:
                with turns.alone() as breathe:
                    for server in rng.sample(servers, len(servers)):
                        breathe()
                        cells.append(one(server, servers, plan, number, rng, vocab))
                        say(cells[-1])


def one(server: Server, servers: Sequence[Server], plan: Plan, number: int, rng: random.Random, vocab: int) -> Cell:
    meter = Meter({"server": [server.pid]}, alone={"client": os.getpid()})
    mixed = run(server.port, plan, rng, vocab)
    used = meter.used()
    return Cell(server.name, plan.every_s, number, mixed, used.by["server"], used.others)


def say(cell: Cell) -> None:
    """A line of progress."""
    m = cell.mixed
    rate = "no long prompts" if cell.every_s is None else f"one every {cell.every_s:g} s"
    print(
        f"round {cell.round}  {rate:<16} {cell.side:<10} ITL P99 {1e3 * m.itl_p99:7.1f} ms  {m.tokens_per_s:6.1f} t/s  "
        f"queue {m.queue[0]} -> {m.queue[1]}  cores: {cell.server_cores:.2f}, others {cell.other_cores:.2f}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
