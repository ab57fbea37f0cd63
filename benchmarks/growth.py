"""What a request costs as there are more of them and as prompts grow: time, CPU and memory, as tables and pictures.

    python -m benchmarks.growth [--inflight 1 ...] [--prompts 128 ...] [--plots FOLDER] [--json FILE]

A real cluster, `distserve up --colocated`, with a tiny random model (hidden size 64, 4 layers), so that what surrounds
the arithmetic shows. Requests in flight: that many streams at once, prompts of 32 tokens and 32 out, all in one step.
Prompts: one stream, so many tokens in and 4 out; the model takes 16,384. Each point is measured several times, in an
order that is drawn, after an unmeasured run.

Memory is what the processes hold above what they held before the point, at its highest; the KV pool is in memory
before, so this is activations and what is kept for each request.

Nothing should grow faster than its input: `growth` is the power p of cost ~ size^p between neighbouring points, 0 for a
cost that stays, 1 for one in step with the size. Pictures need matplotlib (`distserve[bench]`).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.load import Case, draw_prompts, measure
from benchmarks.load_cpu import Meter, PeakMemory, conditions
from benchmarks.load_server import Server, distserve_up, orderly_end
from benchmarks.load_stats import Spread, growth_exponent
from benchmarks.load_turns import Turns
from tests.tiny_models import VOCAB_SIZE, make_tiny

INFLIGHT = (1, 4, 16, 64, 250, 500, 1000)
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192)
MAX_POSITIONS = 16384
REQUESTS_LEAST = 64
NEVER_MORE = 1.2  # a power above this is faster than its input, by more than the noise
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Point:
    """One run at one size. `wall_s` and `cpu_s` a request (of the servers' processes), `ttft_s` the median,
    `peak_bytes` what memory grew by over the idle cluster, at its highest."""

    size: int
    wall_s: float
    cpu_s: float
    ttft_s: float
    peak_bytes: float


COSTS = {"wall_s": "time", "cpu_s": "CPU", "ttft_s": "TTFT"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inflight", type=int, nargs="*", default=list(INFLIGHT))
    parser.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS), help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="a prefill and a decode worker, not one that does both")
    parser.add_argument("--plots", type=Path, help="a folder for the pictures")
    parser.add_argument("--lock", type=Path, help="a file to hold (flock) while something is measured")
    parser.add_argument("--json", type=Path, help="write every run there too")
    a = parser.parse_args()
    turns = Turns(a.lock)
    series: dict[str, list[Point]] = {}
    with tempfile.TemporaryDirectory() as scratch, orderly_end():
        with cluster(Path(scratch), apart=a.apart) as server:
            todo = {"requests in flight": [inflight_case(n) for n in a.inflight]}
            todo["prompt tokens"] = [Case(1, n, 4, 4) for n in a.prompts]
            for axis, cases in todo.items():
                series[axis] = measure_all(server, cases, a.rounds, turns, by_prompt=axis == "prompt tokens")
    for axis, points in series.items():
        print(f"{table(axis, points)}\n")
    if a.json:
        rows = {axis: [asdict(p) for p in points] for axis, points in series.items()}
        a.json.write_text(json.dumps({"conditions": conditions(), **rows}, indent=1))
    if a.plots:
        from benchmarks.growth_plots import plot  # here: matplotlib is wanted for pictures alone

        for path in plot(series, a.plots):
            print(path)


def inflight_case(streams: int) -> Case:
    return Case(streams=streams, prompt=32, output=32, requests=max(REQUESTS_LEAST if streams > 1 else 16, 2 * streams))


@contextmanager
def cluster(folder: Path, *, apart: bool) -> Iterator[Server]:
    settings = {
        # Little more than the largest case needs, so that the unmeasured round has touched all of it.
        "kv.num_blocks": 4608,
        "model.max_model_len": MAX_POSITIONS,
        "decode.max_num_seqs": 1024,
        "decode.max_waiting": 2048,
        "prefill.max_waiting": 2048,
        "gateway.max_concurrent": 4096,
    }
    model = tiny_model(folder / "model")
    options = [] if apart else ["--colocated"]
    with distserve_up("growth", model, folder / "up.log", options=options, settings=settings) as server:
        server.wait_ready(120.0)
        yield server


def tiny_model(folder: Path) -> Path:
    """The tests' tiny random Llama, with a context of MAX_POSITIONS."""
    make_tiny("llama", folder)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {key: MAX_POSITIONS}))
    return folder


def measure_all(server: Server, cases: Sequence[Case], rounds: int, turns: Turns, *, by_prompt: bool) -> list[Point]:
    rng = random.Random()
    points = []
    for number in range(rounds + 1):
        with turns.alone() as breathe:
            for case in rng.sample(list(cases), len(cases)) if number else cases:
                breathe()
                found = measure_point(server, case, rng, case.prompt if by_prompt else case.streams)
                if number:
                    points.append(found)
    return points


def measure_point(server: Server, case: Case, rng: random.Random, size: int) -> Point:
    prompts = draw_prompts(rng, case, VOCAB_SIZE)
    with PeakMemory(server.pid) as memory:
        meter = Meter({"server": [server.pid]})
        found = measure(server.port, case, prompts)
        used = meter.used()
    return Point(
        size=size,
        wall_s=case.output / found.tokens_per_s,
        cpu_s=used.by["server"] * used.wall_s / case.requests,
        ttft_s=found.ttft_p50,
        peak_bytes=memory.grown_bytes,
    )


def by_size(points: Sequence[Point]) -> dict[int, list[Point]]:
    return {size: [p for p in points if p.size == size] for size in sorted({p.size for p in points})}


def table(axis: str, points: Sequence[Point]) -> str:
    """Each size with its costs (medians and range) and the power by which they grew since the size before."""
    head = f"| {axis} | time ms | CPU ms | TTFT ms | memory MiB | KiB for one | growth: time, CPU, TTFT |"
    lines = [head, "|---" * 7 + "|"]
    before: dict[str, float] = {}
    before_size = 0
    for size, runs in by_size(points).items():
        costs = {key: Spread.of(1e3 * getattr(p, key) for p in runs) for key in COSTS}
        memory = Spread.of(p.peak_bytes / MIB for p in runs)
        powers = [
            growth_exponent([before_size, size], [before[key], costs[key].median]) if before else 0.0 for key in COSTS
        ]
        grown = ", ".join(f"{p:+.2f}{'!' if p > NEVER_MORE else ''}" for p in powers) if before else ""
        lines.append(
            f"| {size:,} | {costs['wall_s'].text(2)} | {costs['cpu_s'].text(2)} | {costs['ttft_s'].text()} "
            f"| {memory.text()} | {memory.median * 1024 / size:.1f} | {grown} |"
        )
        before, before_size = {key: spread.median for key, spread in costs.items()}, size
    note = f"Time and CPU are a request's, memory that of all together. !: a power over {NEVER_MORE}."
    return "\n".join([*lines, "", note])


if __name__ == "__main__":
    main()
