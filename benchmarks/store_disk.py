"""The store's disk tier against plain file writes and reads of the same sizes, interleaved in one run.

    python -m benchmarks.store_disk [--rounds 7] [--folder DIR] [--json FILE]        (about 3 minutes, 3 GB of disk)

What stands beside what, each moving the same payload bytes in calls of the same size, from and to the same memory:
  plain    pwritev of the payloads to a file whose space is allocated, past the kernel's cache (O_DIRECT), and one
           fdatasync at the end; preadv the same way. "cached": without O_DIRECT; its reads come from memory.
  tier     DiskTier.append and one flush(); DiskTier.read, in the order of writing and in random order. Every block gets
           a header of 4 KiB and a checksum, and is checked when it is read.
  xxh3     the checksum alone, over the same payloads.

In each round every cell is measured once; a ratio is made within each round; the median (lowest to highest) of the
rounds is shown. Then compaction (55 % of the blocks freed at random), and opening a folder: sealed segments by their
index, an unsealed one by its records' headers, for more and more records.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distserve.kv.layout import block_bytes
from distserve.messages import KVLayout
from distserve_kvstore.disk import DiskOptions, DiskTier, Record
from distserve_kvstore.disk.format import payload_sum

MIB = 1 << 20
CELL_BYTES = 256 * MIB  # of payload, moved in one cell
CALLS = (1, 16, 64)  # blocks in one call
LAYOUTS = {
    "360 KiB": KVLayout(
        weights="m", dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, rope=""
    ),
    "64 KiB": KVLayout(
        weights="b", dtype="bfloat16", num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, rope=""
    ),
}
TINY = KVLayout(weights="t", dtype="bfloat16", num_layers=1, num_kv_heads=1, head_dim=64, block_size=16, rope="")
OPTIONS = DiskOptions(capacity_bytes=4 << 30, min_free_fraction=0.0)
RECORDS = (2_000, 20_000, 100_000)  # of 4 KiB payloads, for opening

Rows = npt.NDArray[np.uint8]
Cells = dict[str, float]


def memory(n: int, size: int, seed: int) -> Rows:
    """As an arena has it. uint8 [n, size]."""
    rows = np.frombuffer(mmap.mmap(-1, n * size), np.uint8).reshape(n, size)
    rows[:] = np.random.default_rng(seed).integers(0, 256, (n, size), np.uint8)
    return rows


def names(n: int, seed: int) -> list[bytes]:
    return [row.tobytes() for row in np.random.default_rng(seed).integers(0, 256, (n, 32), np.uint8)]


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def batches(n: int, a_call: int) -> list[range]:
    return [range(i, min(n, i + a_call)) for i in range(0, n, a_call)]


@contextmanager
def fresh(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def plain(folder: Path, source: Rows, target: Rows, calls: Sequence[range], *, direct: bool) -> tuple[float, float]:
    """Seconds to write and to read."""
    fd = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0))
    size = source.shape[1]
    os.posix_fallocate(fd, 0, source.nbytes)

    def write() -> None:
        for call in calls:
            os.pwritev(fd, [source[i].data for i in call], call.start * size)
        os.fdatasync(fd)

    def read() -> None:
        for call in calls:
            os.preadv(fd, [target[i].data for i in call], call.start * size)

    try:
        return seconds(write), seconds(read)
    finally:
        os.close(fd)


def tier_cells(folder: Path, layout: KVLayout, source: Rows, target: Rows, calls: Sequence[range]) -> Cells:
    n = len(source)
    hashes = names(n, 1)
    tier, _ = DiskTier.open(folder, layout, OPTIONS)
    places: list[int] = []

    def write() -> None:
        for call in calls:
            places.extend(tier.append([Record(hashes[i], hashes[i - 1], i, "tenant", "talk", source[i]) for i in call]))
        tier.flush()

    def read(order: Sequence[int]) -> None:
        for call in calls:
            some = [order[i] for i in call]
            errors = tier.read([places[i] for i in some], [hashes[i] for i in some], [target[i].data for i in some])
            assert not any(errors)

    try:
        cells = {"tier write": seconds(write), "tier read": seconds(lambda: read(range(n)))}
        assert (target == source).all()
        order = np.random.default_rng(2).permutation(n).tolist()
        return cells | {"tier read, random": seconds(lambda: read(order))}
    finally:
        tier.close()


def one_round(parent: Path, layout: KVLayout, source: Rows, target: Rows, a_call: int) -> Cells:
    """GB/s of each cell."""
    calls = batches(len(source), a_call)
    cells: Cells = {}
    for kind, direct in (("plain", True), ("cached", False)):
        with fresh(parent) as folder:
            cells[f"{kind} write"], cells[f"{kind} read"] = plain(folder, source, target, calls, direct=direct)
    with fresh(parent) as folder:
        cells |= tier_cells(folder, layout, source, target, calls)
    cells["xxh3"] = seconds(lambda: [payload_sum(row.data) for row in source])
    return {name: source.nbytes / s / 1e9 for name, s in cells.items()}


def compaction(parent: Path, layout: KVLayout, source: Rows) -> Cells:
    """55 % of the blocks are freed, anywhere: GB/s of payload moved, and of space given back."""
    with fresh(parent) as folder:
        tier, _ = DiskTier.open(folder, layout, OPTIONS)
        hashes = names(len(source), 1)
        places = tier.append(
            [Record(h, hashes[0], i, "", "", row) for i, (h, row) in enumerate(zip(hashes, source, strict=True))]
        )
        tier.free(random.Random(3).sample(places, int(len(places) * 0.55)))
        moved = freed = 0

        def run() -> None:
            nonlocal moved, freed
            more = True
            while more:
                report = tier.compact(32 * MIB)
                moved, freed, more = moved + report.num_moved, freed + report.freed_bytes, report.more

        s = seconds(run)
        tier.close()
        return {"moved": moved * source.shape[1] / s / 1e9, "given back": freed / s / 1e9}


def opening(parent: Path, num_records: int) -> Cells:
    """Microseconds a record to open a folder, by indexes, and with all records in one segment that has none."""
    with fresh(parent) as folder:
        rows = memory(1024, block_bytes(TINY), 4)
        hashes = names(num_records, 5)
        found: Cells = {}
        for kind in ("by index", "by headers"):
            place = folder / kind.replace(" ", "-")
            options = DiskOptions(8 << 30, (64 if kind == "by index" else 1024) * MIB, min_free_fraction=0.0)
            tier, _ = DiskTier.open(place, TINY, options)
            for call in batches(num_records, 1024):
                tier.append(
                    [Record(hashes[i], hashes[i - 1], i, "tenant", f"talk {i // 100}", rows[i % 1024]) for i in call]
                )
            if kind == "by headers":  # as a killed process leaves it
                shutil.copytree(place, crashed := folder / "crashed")
                tier.close()
                place = crashed
            else:
                tier.close()
            began = time.perf_counter()
            tier, runs = DiskTier.open(place, TINY, options)
            found[kind] = (time.perf_counter() - began) / num_records * 1e6
            assert sum(len(run.places) for run in runs) == num_records
            tier.close()
        return found


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, in {args.folder}, {args.rounds} rounds")
    results: dict[str, object] = {}
    columns = [
        "plain write",
        "cached write",
        "tier write",
        "plain read",
        "cached read",
        "tier read",
        "tier read, random",
    ]
    print("\nGB/s of payload\n| block, blocks a call | " + " | ".join(columns) + " | write / plain | read / plain |")
    print("|---" * (len(columns) + 3) + "|")
    for size, layout in LAYOUTS.items():
        n = CELL_BYTES // block_bytes(layout)
        source, target = memory(n, block_bytes(layout), 0), memory(n, block_bytes(layout), 1)
        for a_call in CALLS:
            rounds = [one_round(args.folder, layout, source, target, a_call) for _ in range(args.rounds)]
            cells = {name: [r[name] for r in rounds] for name in rounds[0]}
            ratios = [[r[f"tier {what}"] / r[f"plain {what}"] for r in rounds] for what in ("write", "read")]
            row = [spread(cells[c]) for c in columns] + [spread(ratio) for ratio in ratios]
            print(f"| {size}, {a_call} | " + " | ".join(row) + " |", flush=True)
            results[f"{size}, {a_call}"] = cells
        print(f"xxh3 of {size} blocks: {spread(cells['xxh3'])} GB/s")
    layout = LAYOUTS["360 KiB"]
    source = memory(CELL_BYTES // block_bytes(layout), block_bytes(layout), 0)
    moves = [compaction(args.folder, layout, source) for _ in range(args.rounds)]
    results["compaction"] = moves
    print("\ncompaction, GB/s: " + ", ".join(f"{k} {spread([m[k] for m in moves])}" for k in moves[0]))
    print("\n| records | opened by index, us a record | by headers, us a record |\n|---|---|---|")
    for n in RECORDS:
        opened = [opening(args.folder, n) for _ in range(3)]
        results[f"opening {n}"] = opened
        print(f"| {n:,} | {spread([o['by index'] for o in opened])} | {spread([o['by headers'] for o in opened])} |")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
