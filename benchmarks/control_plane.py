"""The control plane alone: requests and tokens through the gateway, with an engine that computes nothing.

    python -m benchmarks.control_plane [--dynamo VENV] [--rounds 3] [--gateways 1] [--json FILE]

DistServe: nats-server, gateway, one prefill and one decode worker with the null engine (benchmarks/null_engine), one
token a sequence a step, one event each. Dynamo: its front end and a mocker for each role. The sides stand side by
side and take turns, in a random order within a round; each load is a closed loop of streams. CPU is that of all
processes of a side; a round in which other processes kept more than --quiet cores busy is dropped, and measured again
as long as --tries last. Medians of the rounds (lowest to highest).
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.control_plane_load import Load, Measured, measure, median
from benchmarks.control_plane_sides import MODEL_NAME, NullCluster, Side
from benchmarks.null_engine.model import make_model
from benchmarks.peers.dynamo import Dynamo

LOADS = ((1, 1), (1, 64), (16, 1), (16, 64))


def main() -> None:
    a = _arguments()
    rng = random.Random(1)
    rows: dict[tuple[str, Load], list[Measured]] = {}
    points = [(c, n) for c, n in LOADS if not a.only or f"{c}x{n}" in a.only]
    loads = [Load(c, n, measure_s=a.seconds, quick_ack=a.quick_ack) for c, n in points]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(a.model or folder / "model")
        ours = NullCluster(model, folder / "ours", num_gateways=a.gateways, engine_thread=a.engine_thread)
        sides = [stack.enter_context(ours).side]
        if a.dynamo:
            sides.append(stack.enter_context(Dynamo(a.dynamo, model, folder / "dynamo")))
        for round_ in range(a.rounds):
            for load in loads:
                for side in rng.sample(sides, len(sides)):
                    found = quiet_measure(side, load, a.quiet, a.tries, seed=round_)
                    if found is not None:
                        rows.setdefault((side.name, load), []).append(found)
    print(table(rows))
    if a.json:
        a.json.write_text(json.dumps([_plain(name, m) for (name, _), many in rows.items() for m in many]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynamo", type=Path, metavar="VENV", help="as made by benchmarks.peers.dynamo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--engine-thread", action="store_true", help="keep the workers' engine threads")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each measurement")
    parser.add_argument("--quiet", type=float, default=0.15, help="cores that other processes may use")
    parser.add_argument("--tries", type=int, default=2, help="for a quiet round")
    parser.add_argument(
        "--no-quick-ack",
        dest="quick_ack",
        action="store_false",
        help="as most clients are: a server that leaves Nagle's algorithm on then waits up to 40 ms for each packet",
    )
    parser.add_argument("--only", nargs="*", metavar="CxN", help="e.g. 16x64")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="keep the model's folder here")
    parser.add_argument("--json", type=Path, help="every measurement, for later")
    return parser.parse_args()


def quiet_measure(side: Side, load: Load, quiet: float, tries: int, seed: int) -> Measured | None:
    """None if other processes were busy each time."""
    for _ in range(tries):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(measure_side(side, load, seed))
        if found.foreign_cores <= quiet:
            return found
    return None


async def measure_side(side: Side, load: Load, seed: int) -> Measured:
    return await measure("127.0.0.1", side.ports, MODEL_NAME, load, side.pids, seed)


_COLUMNS: dict[str, Callable[[Measured], float]] = {
    "req/s": lambda m: m.requests_per_s,
    "tokens/s": lambda m: m.tokens_per_s,
    "TTFT P50 ms": lambda m: m.ttft_ms(0.5),
    "TTFT P99 ms": lambda m: m.ttft_ms(0.99),
    "CPU us/request": lambda m: m.cpu_us_per_request,
    "CPU us/token": lambda m: 1e6 / m.tokens_per_cpu_s,
    "tokens/CPU-s": lambda m: m.tokens_per_cpu_s,
    "client cores": lambda m: m.client_s / m.seconds,
    "others": lambda m: m.foreign_cores,
}


def table(rows: dict[tuple[str, Load], list[Measured]]) -> str:
    lines = ["| clients x tokens | side | rounds | " + " | ".join(_COLUMNS) + " |", "|---" * (3 + len(_COLUMNS)) + "|"]
    for (name, load), many in sorted(rows.items(), key=lambda r: (r[0][1].num_clients, r[0][1].num_tokens, r[0][0])):
        cells = [spread([column(m) for m in many]) for column in _COLUMNS.values()]
        head = f"| {load.num_clients} x {load.num_tokens} | {name} | {len(many)} | "
        lines.append(head + " | ".join(cells) + " |")
    for (name, load), many in rows.items():
        parts = {p: median([1e6 * m.cpu_s[p] / len(m.answers) for m in many]) for p in many[0].cpu_s}
        each = ", ".join(f"{p} {v:.0f}" for p, v in parts.items())
        failed = sum(m.num_failed for m in many)
        lines.append(f"{name} {load.num_clients} x {load.num_tokens}: us/request {each}; failed {failed}")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    low, high, middle = min(values), max(values), median(values)
    return f"{_short(middle)} ({_short(low)} to {_short(high)})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _plain(name: str, m: Measured) -> dict[str, object]:
    found = {column: of(m) for column, of in _COLUMNS.items()}
    return {"side": name, "clients": m.load.num_clients, "tokens": m.load.num_tokens, "cpu_s": m.cpu_s, **found}


if __name__ == "__main__":
    main()
