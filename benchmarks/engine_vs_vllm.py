"""Our engine, as `distserve up` serves it, against vLLM on the same cores and the same bf16 weights.

    python -m benchmarks.engine_vs_vllm [--quick] [--rounds 4] [--json FILE] [--sides ...]

The sides: `colocated` (one decode worker that prefills too, on all cores), `apart` (one prefill and one decode worker,
half of the cores each), `vllm` (its defaults) and `vllm-256` (chunks of 256 tokens: its best setting for steady
tokens). All are up at the same time and take turns, one at work while the others wait; the cores that the waiting ones
and everybody else used are measured in every cell, and a cell in which that was too much is measured again. In each
round every side does every case, in an order that is drawn, so that a ratio is of figures taken a minute apart: it is
made within each round, and the median (lowest to highest) of the rounds is shown.

A case: so many streams in a closed loop, prompts of random token ids, 64 tokens out, greedy, over HTTP with streaming.
TTFT: from the request's first byte to the first token. TPOT: mean time of a token after the first, one value an answer.
ITL: each pause between two events of a stream.

The floor: the bytes of the weights over the read bandwidth of the cores, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engine_vs_vllm_report import report
from benchmarks.load import Case, draw_prompts, measure
from benchmarks.load_cells import Cell, measure_cell, say
from benchmarks.load_cpu import conditions
from benchmarks.load_floor import read_bandwidth, weight_bytes
from benchmarks.load_server import Server, distserve_up, orderly_end
from benchmarks.load_turns import Turns
from benchmarks.peers import vllm
from distserve.machine import usable_cores
from distserve.models import resolve

SIDES = ("colocated", "apart", "vllm", "vllm-256")
STREAMS = (1, 4, 16, 32)
PROMPTS = (128, 512)
OUTPUT = 64
READY_S = 120.0
# What all sides get: sequences of 4,096 tokens, 64 at once, 2 GiB of KV.
MAX_LEN, MAX_SEQS, KV_GIB = 4096, 64, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="catalogue name or folder, in bf16")
    parser.add_argument("--sides", nargs="+", choices=[*SIDES, "before"], default=list(SIDES))
    parser.add_argument("--before", type=Path, help="another checkout of the project: its colocated engine is `before`")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS), help="tokens")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="under 5 minutes: fewer points, 1 round")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings for our sides")
    parser.add_argument("--venv", type=Path, default=vllm.default_venv(), help="where vLLM is or will be installed")
    parser.add_argument("--lock", type=Path, help="a file to hold (flock) while something is measured")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs there")
    parser.add_argument("--json", type=Path, help="write every cell there too")
    a = parser.parse_args()
    if a.quick:
        a.streams, a.prompts, a.rounds = [1, 16], [128], 1
    settings = {"model": str(a.model), "settings": " ".join(a.set), "rounds": a.rounds}
    found: dict[str, Any] = {"conditions": conditions() | settings, "sides": a.sides, "cells": []}
    with tempfile.TemporaryDirectory() as scratch, orderly_end():
        try:
            run(a, a.logs or Path(scratch), found)
        finally:  # what was measured until Ctrl-C is not lost
            if found["cells"]:
                print(report(found))
                if a.json:
                    rows = [cell.as_json() for cell in found["cells"]]
                    a.json.write_text(json.dumps(found | {"cells": rows}, indent=1))


def run(a: argparse.Namespace, logs: Path, found: dict[str, Any]) -> None:
    """Measure into `found`: `cells`, and `floor`: `weight_bytes` of a step, `bytes_per_s` by number of cores, measured
    before the first round and after each."""
    model = Path(resolve(a.model))
    turns = Turns(a.lock)
    python = vllm.install(a.venv) if any("vllm" in side for side in a.sides) else Path()
    found["floor"] = {"weight_bytes": weight_bytes(model), "bytes_per_s": {}}
    add_bandwidths(found["floor"]["bytes_per_s"], turns)
    rng = random.Random()  # seeded by the system: servers may have seen an earlier run's prompts
    with ExitStack() as stack:
        servers = []
        for side in a.sides:
            with turns.beside_others():
                server = stack.enter_context(start(side, model, python, logs, a.before, a.set))
                server.wait_ready(vllm.READY_S if "vllm" in side else READY_S)
                warm_up(server, cases(a), rng, vocab_size(model))
            servers.append(server)
            print(f"{side} is ready", file=sys.stderr, flush=True)
        for number in range(1, a.rounds + 1):
            one_round(found["cells"], servers, cases(a), number, rng, vocab_size(model), turns)
            add_bandwidths(found["floor"]["bytes_per_s"], turns)


def cases(a: argparse.Namespace) -> list[Case]:
    """Two requests a stream, at least four in all, so that the percentiles have something to stand on; of many streams
    one each is enough."""
    waves = {n: 1 if a.quick or n > 16 else 2 for n in a.streams}
    return [Case(n, prompt, OUTPUT, max(4, waves[n] * n)) for prompt in a.prompts for n in a.streams]


def warm_up(server: Server, todo: Sequence[Case], rng: random.Random, vocab: int) -> None:
    """The shortest and the longest work once, so that no measured request pays for what is done only once."""
    for case in (todo[0], todo[-1]):
        once = Case(case.streams, case.prompt, 8, case.streams)
        measure(server.port, once, draw_prompts(rng, once, vocab))


def one_round(
    cells: list[Cell],
    servers: Sequence[Server],
    todo: Sequence[Case],
    number: int,
    rng: random.Random,
    vocab: int,
    turns: Turns,
) -> None:
    for case in todo:
        with turns.alone() as breathe:
            for server in rng.sample(list(servers), len(servers)):
                idle = [s for s in servers if s is not server]
                cells.append(measure_cell(server, idle, case, number, rng=rng, vocab_size=vocab, breathe=breathe))
                say(cells[-1])


def start(side: str, model: Path, python: Path, logs: Path, before: Path | None, settings: Sequence[str]) -> Server:
    log = logs / f"{side}.log"
    chosen = {
        "kv.num_blocks": KV_GIB * (1 << 30) // kv_block_bytes(model),
        "model.max_model_len": MAX_LEN,
        "decode.max_num_seqs": MAX_SEQS,
    } | dict(text.split("=", 1) for text in settings)
    match side:
        case "colocated":
            return distserve_up(side, model, log, options=["--colocated"], settings=chosen)
        case "before":
            if before is None:
                raise SystemExit("--sides before needs --before FOLDER")
            return distserve_up(side, model, log, options=["--colocated"], settings=chosen, checkout=before)
        case "apart":
            return distserve_up(side, model, log, settings=chosen)
        case "vllm":
            return vllm.server(side, python, model, log, kv_gib=KV_GIB, max_len=MAX_LEN)
    chunk = ["--max-num-batched-tokens", "256"]
    return vllm.server(side, python, model, log, chunk, kv_gib=KV_GIB, max_len=MAX_LEN)


def kv_block_bytes(model: Path) -> int:
    """Of 16 tokens of every layer, bf16."""
    shape = model_config(model)
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return int(shape["num_hidden_layers"] * 2 * 16 * shape["num_key_value_heads"] * head_dim * 2)


def vocab_size(model: Path) -> int:
    return int(model_config(model)["vocab_size"])


def model_config(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found


def add_bandwidths(found: dict[str, list[float]], turns: Turns) -> None:
    """Bytes a second, by number of cores: of one, and of all."""
    for threads in sorted({1, len(usable_cores())}):
        with turns.alone():
            found.setdefault(str(threads), []).append(read_bandwidth(threads))


if __name__ == "__main__":
    main()
