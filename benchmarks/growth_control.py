"""How the control plane grows: requests in flight 1 to 1,000, and workers 1 to 8 of each role, with the null engine.

    python -m benchmarks.growth_control [--part flight|workers|both|none] [--json FILE] [--plot FILE]

CPU and memory for a request as one thing grows and all else stays. Each point is a closed loop of streams of 64 tokens;
memory is what the processes hold beyond what they held before the first request. More requests in flight meet one
worker of each role that steps as fast as it can. More workers have 64 requests in flight each and passes of 20 ms, as
an engine's, so that the load grows with them. `slope` is the exponent of a power law between the two ends, of the whole
cost against what grows: 1 is proportional, above it the cost grows faster than its input. --plot needs matplotlib
(`pip install 'distserve[bench]'`).
"""

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from benchmarks.control_plane_cpu import Usage, resident_bytes
from benchmarks.control_plane_load import Load, Measured, measure
from benchmarks.control_plane_sides import MODEL_NAME, NullCluster, Side
from benchmarks.null_engine.model import make_model

IN_FLIGHT = (1, 4, 16, 64, 256, 1000)
WORKERS = (1, 2, 4, 8)
CLIENTS_A_WORKER = 64
PASS_MS = 20.0
NUM_TOKENS = 64
IDLE_S = 3.0
SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Point:
    """`size`: of what grows. Memory is the peak, beyond `size` 0."""

    size: int
    requests_per_s: float
    ttft_ms: float
    cpu_us: dict[str, float]  # a request, by role
    memory_kib: dict[str, float]  # in all, by role
    idle_cores: float  # CPU of all processes without a request: beats and who hears them
    foreign_cores: float

    @property
    def cpu_us_per_request(self) -> float:
        return sum(self.cpu_us.values())

    @property
    def memory_kib_in_all(self) -> float:
        return sum(self.memory_kib.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["flight", "workers", "both", "none"], default="both")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each point")
    parser.add_argument("--json", type=Path, help="every point, for later; an existing file's other part is kept")
    parser.add_argument("--plot", type=Path, help="a picture of all points, those of --json's file included")
    a = parser.parse_args()
    found = _read(a.json)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        if a.part in ("flight", "both"):
            found["flight"] = in_flight(model, Path(folder), a.seconds)
        if a.part in ("workers", "both"):
            found["workers"] = with_workers(model, Path(folder), a.seconds)
    for name, points in found.items():
        print(table(name, points))
    if a.json:
        a.json.write_text(json.dumps({name: [asdict(p) for p in points] for name, points in found.items()}))
    if a.plot:
        plot(found, a.plot)


def _read(path: Path | None) -> dict[str, list[Point]]:
    if path is None or not path.exists():
        return {}
    return {name: [Point(**p) for p in points] for name, points in json.loads(path.read_text()).items()}


def in_flight(model: Path, folder: Path, seconds: float) -> list[Point]:
    """One cluster, more and more clients."""
    with NullCluster(model, folder / "flight") as cluster:
        side, idle = cluster.side, _memory(cluster.side)
        return [_point(side, idle, _flight_load(n, seconds), n) for n in IN_FLIGHT]


def with_workers(model: Path, folder: Path, seconds: float) -> list[Point]:
    """One cluster, more and more workers of each role, and clients with them."""
    points = []
    with NullCluster(model, folder / "workers", pass_ms=PASS_MS) as cluster:
        for n in WORKERS:
            cluster.grow(n)
            load = Load(n * CLIENTS_A_WORKER, NUM_TOKENS, warm_s=3.0, measure_s=seconds)
            points.append(_point(cluster.side, _memory(cluster.side), load, n))
    return points


def _flight_load(num_clients: int, seconds: float) -> Load:
    """Every client has an answer before the measurement begins: 1,000 take seconds for that on two cores."""
    longer_s = num_clients / 250
    return Load(num_clients, NUM_TOKENS, warm_s=0.7 + longer_s, measure_s=seconds + longer_s)


def _idle_cores(side: Side) -> float:
    usage = [Usage(pid) for pid in side.pids.values()]
    time.sleep(IDLE_S)
    return sum(u.spent_s() for u in usage) / IDLE_S


def _point(side: Side, idle: dict[str, int], load: Load, size: int) -> Point:
    idle_cores = _idle_cores(side)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured, peak = runner.run(_measure(side, load))
    grown = {name: (peak[name] - idle[name]) / 1024 for name in idle}
    return Point(
        size,
        measured.requests_per_s,
        measured.ttft_ms(0.5),
        _by_role({name: 1e6 * s / max(1, len(measured.answers)) for name, s in measured.cpu_s.items()}),
        _by_role(grown),
        idle_cores,
        measured.foreign_cores,
    )


async def _measure(side: Side, load: Load) -> tuple[Measured, dict[str, int]]:
    peak = _memory(side)

    async def watch() -> None:
        while True:
            for name, now in _memory(side).items():
                peak[name] = max(peak[name], now)
            await asyncio.sleep(SAMPLE_S)

    watching = asyncio.create_task(watch())
    try:
        return await measure("127.0.0.1", side.ports, MODEL_NAME, load, side.pids), peak
    finally:
        watching.cancel()


def _memory(side: Side) -> dict[str, int]:
    return {name: resident_bytes(pid) for name, pid in side.pids.items()}


def _by_role(values: dict[str, float]) -> dict[str, float]:
    summed: dict[str, float] = {}
    for name, value in values.items():
        role = name.partition("-")[0]
        summed[role] = summed.get(role, 0.0) + value
    return summed


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Exponent k of cost ~ size^k from the first to the last point."""
    return math.log(costs[-1] / costs[0]) / math.log(sizes[-1] / sizes[0])


def table(name: str, points: list[Point]) -> str:
    what = {"flight": "in flight", "workers": "workers of each role"}[name]
    lines = [
        f"| {what} | req/s | TTFT P50 ms | CPU us/request | by role | memory KiB | by role | idle cores | others |"
    ]
    lines.append("|---" * 9 + "|")
    for p in points:
        cpu = ", ".join(f"{role} {v:.0f}" for role, v in p.cpu_us.items())
        memory = ", ".join(f"{role} {v:,.0f}" for role, v in p.memory_kib.items())
        lines.append(
            f"| {p.size:,} | {p.requests_per_s:,.0f} | {p.ttft_ms:,.1f} | {p.cpu_us_per_request:,.0f} | {cpu} "
            f"| {p.memory_kib_in_all:,.0f} | {memory} | {p.idle_cores:.3f} | {p.foreign_cores:.2f} |"
        )
    sizes = [p.size for p in points]
    whole = slope(sizes, [p.size * p.cpu_us_per_request for p in points])
    memory_slope = slope(sizes, [max(1.0, p.memory_kib_in_all) for p in points])
    lines.append(f"slope of CPU {whole:.2f}, of memory {memory_slope:.2f}")
    return "\n".join(lines)


def plot(found: dict[str, list[Point]], path: Path) -> None:
    """Two rows of two: CPU of a request and memory, against each thing that grows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"flight": "requests in flight", "workers": "workers of each role"}
    figure, axes = pyplot.subplots(2, len(found), figsize=(5 * len(found), 7), squeeze=False)
    for column, (name, points) in enumerate(found.items()):
        sizes = [p.size for p in points]
        cpu, memory = axes[0][column], axes[1][column]
        for role in points[0].cpu_us:
            cpu.plot(sizes, [p.cpu_us[role] for p in points], marker="o", label=role)
        cpu.plot(sizes, [p.cpu_us_per_request for p in points], marker="o", color="black", label="all")
        for role in points[0].memory_kib:
            memory.plot(sizes, [max(0.1, p.memory_kib[role] / 1024) for p in points], marker="o", label=role)
        for axis, what in ((cpu, "CPU of a request, us"), (memory, "memory beyond idle, MiB")):
            axis.set_xscale("log")
            axis.set_xticks(sizes, [f"{s:,}" for s in sizes])
            axis.set_xlabel(titles[name])
            axis.set_ylabel(what)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        cpu.set_ylim(bottom=0)
        memory.set_ylim(bottom=0)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
