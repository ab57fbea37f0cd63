"""From the JSON of each benchmark to the rows of one table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.interference_report import gaps, of, rates, ratio, sides
from benchmarks.load_stats import Spread, percentile, ratios
from benchmarks.overload_report import judged


class Row(NamedTuple):
    what: str
    figure: str


def engine_rows(found: dict[str, Any]) -> list[Row]:
    """A row for each side and case, one with the floor for each side at one stream."""
    rows = []
    cells = found["cells"]
    for key in dict.fromkeys((_case(c), c["server"]) for c in cells):
        mine = [c for c in cells if (_case(c), c["server"]) == key]
        speed = Spread.of(c["tokens_per_s"] for c in mine)
        ttft = Spread.of(1e3 * percentile(c["ttfts_s"], 50) for c in mine)
        tpot = Spread.of(1e3 * percentile(c["tpots_s"], 50) for c in mine)
        figure = f"{speed.text()} tokens/s, TTFT P50 {ttft.text(0)} ms, TPOT P50 {tpot.text()} ms"
        rows.append(Row(f"{key[1]}, {key[0]}", figure))
    rows.append(_floor_row(found))
    return rows


def _case(cell: dict[str, Any]) -> str:
    case = cell["case"]
    return f"{case['streams']} stream{'s' * (case['streams'] > 1)}, {case['prompt']} in, {case['output']} out"


def _floor_row(found: dict[str, Any]) -> Row:
    cores, speeds = max(found["floor"]["bytes_per_s"].items(), key=lambda item: int(item[0]))
    speed = max(speeds)
    floor_ms = 1e3 * found["floor"]["weight_bytes"] / speed
    return Row(f"floor of a decode step, {cores} cores", f"{floor_ms:.1f} ms: weights read at {speed / 1e9:.1f} GB/s")


def start_rows(found: dict[str, Any]) -> list[Row]:
    runs = found["runs"]
    parts = ("start", "imports", "load", "warm_up", "register", "known", "first_answer")
    where = ", ".join(f"{p.replace('_', ' ')} {Spread.of(r[p] for r in runs).median:.1f}" for p in parts)
    total = Spread.of(run["total"] for run in runs)
    return [Row("distserve up to the first answer", f"{total.text(1)} s: {where}")]


def transport_rows(found: dict[str, Any]) -> list[Row]:
    rows = []
    for kind, plain in (("shm", "memcpy|1 MiB"), ("tcp", "socket, 4 in flight|1 MiB")):
        ours = found[f"{kind}, 4 in flight|1 MiB"]["gb_per_s"]
        theirs = found[plain]["gb_per_s"]
        ratio = Spread.of(a / b for a, b in zip(ours, theirs, strict=True))
        what = f"{kind}, leases of 1 MiB, 4 in flight"
        rows.append(Row(what, f"{Spread.of(ours).text(2)} GB/s, {ratio.text(2)} of {plain.split('|')[0]}"))
    return rows


def control_plane_rows(found: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for key in dict.fromkeys((m["clients"], m["tokens"], m["side"]) for m in found):
        mine = [m for m in found if (m["clients"], m["tokens"], m["side"]) == key]

        def of(column: str, mine: Iterable[dict[str, Any]] = mine) -> Spread:
            return Spread.of(m[column] for m in mine)

        figure = (
            f"{of('req/s').text(0)} requests/s, TTFT P50 {of('TTFT P50 ms').text(2)} ms, "
            f"{of('CPU us/token').text(0)} us CPU a token"
        )
        rows.append(Row(f"control plane, {key[2]}, {key[0]} clients, {key[1]} tokens", figure))
    return rows


def growth_rows(found: dict[str, Any]) -> list[Row]:
    rows = []
    for axis in ("requests in flight", "prompt tokens"):
        points = found.get(axis, [])
        sizes = sorted({p["size"] for p in points})
        costs = [Spread.of(1e3 * p["cpu_s"] for p in points if p["size"] == size).median for size in sizes]
        each = ", ".join(f"{size:,}: {cost:.1f}" for size, cost in zip(sizes, costs, strict=True))
        rows.append(Row(f"CPU ms a request (tiny model) by {axis}", each))
    return rows


def store_rows(found: dict[str, Any]) -> list[Row]:
    """A row for each side and size: GB/s put and got. What failed has one too."""
    cells = found["cells"]
    rows = []
    for side, size in dict.fromkeys((c["side"], c["size"]) for c in cells):
        mine = [c for c in cells if (c["side"], c["size"]) == (side, size)]
        put, got = (
            Spread.of(c["num_bytes"] / c["seconds"] / 1e9 for c in mine if c["verb"] == verb).text(2)
            for verb in ("put", "get")
        )
        rows.append(Row(f"store, {side}, values of {size}", f"put {put} GB/s, get {got} GB/s"))
    return rows + [Row(f"store, {f['side']}, values of {f['size']}", "failed") for f in found["failures"]]


def store_ttft_rows(found: list[dict[str, Any]]) -> list[Row]:
    """A row for each place where 90 % of the prompt is known, with the ratio to a prompt that nobody knows."""
    rows = []
    uncached = {r["turn"]: r["ttft_s"] for r in found if r["case"] == "none"}
    for case in dict.fromkeys(r["case"] for r in found):
        mine = {r["turn"]: r["ttft_s"] for r in found if r["case"] == case}
        figure = f"{Spread.of(1e3 * s for s in mine.values()).text(0)} ms"
        if case != "none":
            figure += f", {ratios(mine, uncached).text(2)} of uncached"
        rows.append(Row(f"TTFT, 90 % of 2,000 tokens known to {case}", figure))
    return rows


def sim_rows(found: dict[str, Any]) -> list[Row]:
    """A row for each machine, load and side."""
    rows = []
    for machine, its in found.items():
        for f in its["prefill"]:
            figure = (
                f"promises kept {100 * f['kept']:.1f} %, goodput {100 * f['goodput']:.0f} %, "
                f"TTFT P99 up to 512 tokens {f['ttft_s']['<= 512'][1]:.2f} s"
            )
            rows.append(Row(f"simulated, {machine}, load {f['load']:g}, {f['side']}", figure))
        for f in its["decode"]:
            figure = f"TPOT kept {100 * f['kept']:.1f} %, {f['tokens_per_s']:,.0f} tokens/s"
            rows.append(Row(f"simulated decode, {machine}, load {f['load']:g}, {f['side']}", figure))
    return rows


def interference_rows(found: dict[str, Any]) -> list[Row]:
    """A row for each rate and side."""
    cells = found["cells"]
    rows = []
    for every_s in rates(cells):
        for side in sides(cells):
            alone, loaded = of(cells, side, None), of(cells, side, every_s)
            waits = [s for c in loaded.values() for s in c["long_ttfts_s"]]
            figure = (
                f"ITL P99 {gaps(alone).text(0)} -> {gaps(loaded).text(0)} ms, ratio {ratio(alone, loaded).text(2)}, "
                f"long TTFT P50 {percentile(waits, 50):.1f} s{' !' * any(c['grows'] for c in loaded.values())}"
            )
            rows.append(Row(f"8 answers beside 2,048 tokens every {every_s:g} s, {side}", figure))
    return rows


def overload_rows(found: dict[str, Any]) -> list[Row]:
    rows = []
    for side in dict.fromkeys(c["side"] for c in found["cells"]):
        mine = [judged(c) for c in found["cells"] if c["side"] == side]
        figure = (
            f"accepted {Spread.of(100 * j.accepted for j in mine).text(0)} %, of these in time "
            f"{Spread.of(100 * j.in_time for j in mine).text(0)} %, {Spread.of(j.goodput_hz for j in mine).text(2)}/s"
        )
        rows.append(Row(f"overload, {side}", figure))
    return rows
