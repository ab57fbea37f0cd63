"""Everything that is measured on one machine, as one table.

    python -m benchmarks.all            ours alone, within 5 minutes (make bench)
    python -m benchmarks.all --peers    beside vLLM, Dynamo, Mooncake and LMCache, which are installed first; about 90
                                        minutes and 6 GB of disk (make bench-peers)

Each part is a benchmark of its own, run as such (`python -m benchmarks.NAME --help`), with few rounds; its lines go to
the terminal with --peers, and its figures into the table. A part that fails is named and the others go on; the exit
status says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.all_rows import (
    Row,
    control_plane_rows,
    engine_rows,
    growth_rows,
    interference_rows,
    overload_rows,
    sim_rows,
    start_rows,
    store_rows,
    store_ttft_rows,
    transport_rows,
)
from benchmarks.load_cpu import conditions
from distserve.machine import cache_folder

PART_S = 3600.0


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark: `python -m benchmarks.<module> <arguments> --json FILE`, and how its JSON becomes rows."""

    module: str
    arguments: tuple[str, ...]
    rows: Callable[[Any], list[Row]]


BRIEF = (
    Part("engine_vs_vllm", ("--sides", "colocated", "--prompts", "128", "--rounds", "2"), engine_rows),
    Part("start", ("--runs", "2"), start_rows),
    Part("control_plane", ("--rounds", "2", "--seconds", "2"), control_plane_rows),
    Part("transport", ("--rounds", "5"), transport_rows),
    Part("growth", ("--inflight", "1", "16", "250", "--prompts", "128", "1024", "8192", "--rounds", "1"), growth_rows),
    Part("sim", ("--quick",), sim_rows),
)


def with_peers() -> tuple[Part, ...]:
    peers = cache_folder() / "peers"
    dynamo = peers / "dynamo"
    stores = ("--mooncake", str(peers / "mooncake"), "--lmcache", str(peers / "lmcache"))
    return (
        Part("engine_vs_vllm", ("--rounds", "3"), engine_rows),
        Part("control_plane", ("--rounds", "3", "--dynamo", str(dynamo)), control_plane_rows),
        Part("start", ("--runs", "5"), start_rows),
        Part("transport", ("--rounds", "12"), transport_rows),
        Part("store_throughput", ("--rounds", "5", *stores), store_rows),
        Part("store_ttft", ("--rounds", "6"), store_ttft_rows),
        Part("interference", (), interference_rows),
        Part("overload", (), overload_rows),
    )


def install_peers() -> None:
    apart = [(name, "install", str(cache_folder() / "peers" / name)) for name in ("dynamo", "mooncake", "lmcache")]
    for command in (("vllm",), *apart):
        print(f"installing {command[0]}, if it is not there yet", file=sys.stderr, flush=True)
        subprocess.run(
            [sys.executable, "-m", f"benchmarks.peers.{command[0]}", *command[1:]], check=True, timeout=PART_S
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="beside vLLM, Dynamo, Mooncake and LMCache")
    parser.add_argument("--only", nargs="*", help="parts, by name")
    a = parser.parse_args()
    began = time.monotonic()
    parts = [p for p in (with_peers() if a.peers else BRIEF) if not a.only or p.module in a.only]
    if a.peers:
        install_peers()
    rows: list[Row] = []
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for part in parts:
            print(f"measuring: {part.module}", file=sys.stderr, flush=True)
            try:
                rows += part.rows(run(part, Path(scratch) / f"{part.module}.json", shown=a.peers))
            except (subprocess.SubprocessError, OSError, LookupError, ValueError) as e:
                failed.append(part.module)
                print(f"{part.module} failed: {e}", file=sys.stderr, flush=True)
    print(f"\n{', '.join(f'{k} {v}' for k, v in conditions().items())}; {time.monotonic() - began:.0f} s\n")
    print(table(rows))
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


def run(part: Part, file: Path, *, shown: bool) -> Any:
    """The part's JSON. Its own report goes to the terminal if `shown`. Raises CalledProcessError, TimeoutExpired."""
    command = [sys.executable, "-m", f"benchmarks.{part.module}", *part.arguments, "--json", str(file)]
    done = subprocess.run(command, stdout=None if shown else subprocess.PIPE, text=True, timeout=PART_S, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return json.loads(file.read_text())


def table(rows: list[Row]) -> str:
    """Aligned, and Markdown all the same."""
    whole = [Row("what", "figure"), *rows]
    widths = [max(len(row.what) for row in whole), max(len(row.figure) for row in whole)]
    lines = [f"| {row.what:<{widths[0]}} | {row.figure:<{widths[1]}} |" for row in whole]
    lines.insert(1, f"|{'-' * (widths[0] + 2)}|{'-' * (widths[1] + 2)}|")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
