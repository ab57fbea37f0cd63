"""Putting KV blocks into a store of another process and getting them back: ours, Mooncake Store, LMCache, a memcpy.

    python -m benchmarks.store_throughput [--rounds 5] [--mooncake VENV] [--lmcache VENV] [--json FILE]

python -m benchmarks.peers.mooncake install VENV, and the same of lmcache, make the environments. For each size of
values every side is up at the same time; in each round every one puts, gets and clears 256 MiB, in an order that is
drawn. Two rounds before the first are not counted: memory is touched for the first time there.

A value is a KV block of 16 tokens; a request 64 of them, at most 64 MiB (store_values). Each side works as it does
best:
    floor             another process copies between two shared mappings, a byte each way a request (store_floor)
    disk              a file past the kernel's cache (store_disk_floor)
    DistServe, shm|tcp        one node; up to 4 offers in flight, fetches one after the other; checksums (store_client)
    DistServe, shm, disk      put: until on disk; get: from a node that was started anew
    Mooncake, tcp|shm         one call a request, registered buffers (peers/mooncake.py)
    LMCache, shm|lm|local     peers/lmcache.py; local is within one process
Every side's bytes are new in each round and compared after each get, outside the time. A side that fails is left out
of that size, and named. CPU is that of the driver and of all servers, from /proc.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.load_cpu import Meter, conditions
from benchmarks.load_server import orderly_end
from benchmarks.load_stats import Spread
from benchmarks.peers import lmcache, mooncake
from benchmarks.store_lines import DriverError
from benchmarks.store_report import Cell, Failure, tables
from benchmarks.store_sides import Side, Verb, module_side, store_side
from benchmarks.store_values import MIB, SIZES, Load
from distserve.bus.embedded import EmbeddedNats

WARM_UP = 2  # rounds: an arena is walked through before its blocks come again


def sides(
    a: argparse.Namespace, load: Load, folder: Path, url: str
) -> Iterator[tuple[str, AbstractContextManager[Side]]]:
    yield "floor", module_side("floor", "store_floor", load, folder)
    for kind in ("shm", "tcp"):
        yield f"DistServe, {kind}", store_side(url, kind, "dram", load, folder)
    if a.disk:
        yield "disk", module_side("disk", "store_disk_floor", load, folder, "--folder", str(folder))
        yield "DistServe, shm, disk", store_side(url, "shm", "disk", load, folder)
    for way in ("shm", "tcp") if a.mooncake else ():
        yield f"Mooncake, {way}", mooncake.side(a.mooncake / "bin" / "python", way, load, folder)
    for way in ("shm", "lm", "local") if a.lmcache else ():
        yield f"LMCache, {way}", lmcache.side(a.lmcache / "bin" / "python", way, load, folder)


def measure(side: Side, load: Load, verb: Verb, turn: int) -> Cell:
    side.prepare(verb)
    meter = Meter({"client": [side.driver.pid], "server": side.servers})
    seconds = side.measure(verb, turn)
    used = meter.used()
    client, server = (used.by[name] * used.wall_s for name in ("client", "server"))
    return Cell(side.name, load.size.label, verb, turn, load.total_bytes, seconds, client, server, used.others)


def one_size(a: argparse.Namespace, load: Load, folder: Path, url: str) -> tuple[list[Cell], list[Failure]]:
    cells, failures = [], []

    def failed(name: str, e: Exception) -> None:
        failures.append(Failure(name, load.size.label, f"{type(e).__name__}: {str(e).splitlines()[-1]}"))
        print(f"{name}, {load.size.label}: {e}", file=sys.stderr, flush=True)

    with ExitStack() as stack:
        up: list[Side] = []
        for name, opening in sides(a, load, folder, url):
            if a.only and not any(part in name for part in a.only):
                continue
            print(f"{load.size.label}: starting {name}", file=sys.stderr, flush=True)
            try:
                up.append(stack.enter_context(opening))
            except (DriverError, OSError, TimeoutError) as e:
                failed(name, e)
        for turn in range(-WARM_UP, a.rounds):
            for side in random.sample(up, len(up)):
                try:
                    found = [measure(side, load, verb, turn + WARM_UP) for verb in ("put", "get")]
                    side.clear(turn + WARM_UP)
                except DriverError as e:
                    failed(side.name, e)
                    up.remove(side)
                    continue
                cells += found if turn >= 0 else []
            print(f"{load.size.label}: round {turn + 1} of {a.rounds}", file=sys.stderr, flush=True)
    order = [name for name, _ in sides(a, load, folder, url)]
    return sorted(cells, key=lambda cell: order.index(cell.side)), failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="in each cell, a multiple of 64")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--mooncake", type=Path, help="its environment")
    parser.add_argument("--lmcache", type=Path, help="its environment")
    parser.add_argument("--no-disk", dest="disk", action="store_false")
    parser.add_argument("--only", nargs="*", help="sides whose name has one of these in it")
    parser.add_argument(
        "--folder", type=Path, help="where the disk tier's files and logs go (default: a temporary one)"
    )
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    a = parser.parse_args()
    cells: list[Cell] = []
    failures: list[Failure] = []
    with tempfile.TemporaryDirectory(dir=a.folder) as scratch, orderly_end(), EmbeddedNats() as nats:
        for label in a.sizes:
            found, wrong = one_size(a, Load(SIZES[label], a.mib * MIB), Path(scratch), nats.url)
            cells += found
            failures += wrong
    print(", ".join(f"{k} {v}" for k, v in conditions().items()))
    print(f"others kept {Spread.of(c.others for c in cells).text(2)} cores busy\n")
    print(tables(cells, failures))
    if a.json:
        a.json.write_text(json.dumps({"cells": [asdict(c) for c in cells], "failures": [asdict(f) for f in failures]}))


if __name__ == "__main__":
    main()
