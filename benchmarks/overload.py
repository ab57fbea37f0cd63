"""Three times the requests that a cluster can serve: with a promise kept or refused, and first come first served.

    python -m benchmarks.overload [--quick] [--model smollm2|tiny] [--times 3] [--rounds 3] [--json FILE]

Two clusters (a prefill and a decode worker each), both up, in turn. First, on the one with admission: TTFT of single
requests, and requests a second of a closed loop (16 streams). Then an open loop (Poisson) of `--times` that rate. The
sides: `admission` (each request asks for a first token within `--slo` times the TTFT of a single one, by X-TTFT-SLO-Ms)
and `fcfs` (scheduler.policy=fcfs, nothing asked; judged by the same time).

Refused: HTTP 429; its latency is until the whole answer has come. Goodput: answers a second, of those that came in
time, over the seconds in which requests came. Answers that had not begun 20 s after the last request are late.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_vs_vllm import vocab_size
from benchmarks.growth import tiny_model
from benchmarks.load import Case, draw_prompts, measure
from benchmarks.load_cpu import Meter, conditions
from benchmarks.load_server import Server, distserve_up, orderly_end
from benchmarks.load_stats import percentile
from benchmarks.load_turns import Turns
from benchmarks.overload_load import Answer, Plan, run
from benchmarks.overload_report import report
from distserve.models import resolve

SIDES = ("admission", "fcfs")
READY_S = 120.0
STREAMS = 16


@dataclass(frozen=True, slots=True)
class Cell:
    side: str
    round: int
    plan: Plan
    answers: list[Answer]
    other_cores: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Of one request at a time, and of a closed loop."""

    ttft_s: float
    requests_hz: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="catalogue name, folder, or `tiny` (random weights)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=8, help="tokens")
    parser.add_argument("--times", type=float, default=3.0, help="offered, of what a closed loop gets")
    parser.add_argument("--slo", type=float, default=4.0, help="times the TTFT of a single request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=30.0, help="seconds in which requests come")
    parser.add_argument("--quick", action="store_true", help="under 2 minutes: 1 round of 8 s")
    parser.add_argument("--lock", type=Path, help="a file to hold (flock) while something is measured")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs there")
    parser.add_argument("--json", type=Path, help="write every answer there too")
    a = parser.parse_args()
    if a.quick:
        a.rounds, a.window = 1, 8.0
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as scratch, orderly_end():
        model = tiny_model(Path(scratch) / "model") if a.model == "tiny" else Path(resolve(a.model))
        try:
            with clusters(model, a.logs or Path(scratch)) as servers:
                measure_all(a, servers, vocab_size(model), cells)
        finally:  # what was measured until Ctrl-C is not lost
            if cells:
                rows = [cell.as_json() for cell in cells]
                print(report(rows))
                if a.json:
                    a.json.write_text(json.dumps({"conditions": conditions(), "cells": rows}, indent=1))


@contextmanager
def clusters(model: Path, logs: Path) -> Iterator[list[Server]]:
    policies = {"admission": "slo", "fcfs": "fcfs"}
    with ExitStack() as stack:
        servers = []
        for side in SIDES:
            settings = {"scheduler.policy": policies[side], "model.max_model_len": 4096, "kv.num_blocks": 4096}
            server = stack.enter_context(distserve_up(side, model, logs / f"{side}.log", settings=settings))
            server.wait_ready(READY_S)
            servers.append(server)
        yield servers


def measure_all(a: argparse.Namespace, servers: Sequence[Server], vocab: int, cells: list[Cell]) -> None:
    rng = random.Random()
    turns = Turns(a.lock)
    with turns.alone():
        for server in servers:  # nobody pays for what is done only once; their passes' speed is known from then on
            closed_loop(server, a, 2 * STREAMS, rng, vocab)
        found = unloaded(servers[0], a, rng, vocab)
    plan = Plan(
        rate_hz=a.times * found.requests_hz,
        slo_s=a.slo * found.ttft_s,
        prompt=a.prompt,
        output=a.output,
        window_s=a.window,
        drain_s=8.0 if a.quick else 20.0,
    )
    print(
        f"alone: TTFT {1e3 * found.ttft_s:.0f} ms; a closed loop of {STREAMS}: {found.requests_hz:.2f} requests/s; "
        f"offered {plan.rate_hz:.2f}, promised {1e3 * plan.slo_s:.0f} ms",
        file=sys.stderr,
        flush=True,
    )
    for number in range(1, a.rounds + 1):
        with turns.alone() as breathe:
            for server in rng.sample(list(servers), len(servers)):
                breathe()
                asked = {"X-TTFT-SLO-Ms": f"{1e3 * plan.slo_s:.0f}"} if server.name == "admission" else {}
                meter = Meter({"server": [server.pid]}, alone={"client": os.getpid()})
                answers = run(server.port, plan, asked, rng, vocab)
                cells.append(Cell(server.name, number, plan, answers, meter.used().others))
                print(f"round {number}  {server.name}: {len(answers)} asked", file=sys.stderr, flush=True)


def unloaded(server: Server, a: argparse.Namespace, rng: random.Random, vocab: int) -> Unloaded:
    single = Case(1, a.prompt, a.output, 5)
    found = measure(server.port, single, draw_prompts(rng, single, vocab))
    return Unloaded(percentile(found.ttfts_s, 50), closed_loop(server, a, (2 if a.quick else 4) * STREAMS, rng, vocab))


def closed_loop(server: Server, a: argparse.Namespace, num: int, rng: random.Random, vocab: int) -> float:
    """Requests a second."""
    case = Case(STREAMS, a.prompt, a.output, num)
    return measure(server.port, case, draw_prompts(rng, case, vocab)).tokens_per_s / case.output


if __name__ == "__main__":
    main()
