"""The store's index as it grows: memory a block; time to look a chain up, to insert, to remove; what doubling costs.

    python -m benchmarks.store_index [--sizes 10000 ...] [--rounds 200] [--json FILE] [--plot FILE]

One process, no store around it. Blocks come as conversations do: one of 500 shared beginnings of 40 blocks, and
50 blocks of its own each; one block in twenty is in a chain of 2,000. Every block is in memory; conversations are
named. `table` is what the columns and the hash table take, by count; `all` what the process has allocated since the
index was made (tracemalloc: numpy's arrays and Python's objects, conversations and links between nodes included);
`policy` what W-TinyLFU takes on top for two tiers; `resident` what the process grew by in all, read from the kernel,
policy included.

A lookup is longest_prefix() of the 2,000 packed hashes of a chain that is there, chains drawn anew each time, so that
little of it is in the processor's caches; `absent`: of 2,000 hashes that are not there. Both by the clock on the wall;
the other times are CPU time, which others on the machine disturb less. `doubling` is the stall of the one insert that
goes beyond the reserved room, of an index of the next power of two of blocks: columns are copied, the table is moved
bit by bit by the inserts after it. Aims, at 1,000,000 blocks: under 200 bytes a block, under 1 ms a lookup.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from distserve_kvstore.eviction import make_policy
from distserve_kvstore.index import BlockIndex

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
LONG = 2_000  # blocks of a long chain
NUM_SHARED, SHARED, OWN = 500, 40, 50
ROOT = bytes(32)


@dataclass(frozen=True, slots=True)
class Point:
    """Bytes a block; times in us, the median and the highest of the rounds where there are two."""

    num_blocks: int
    num_conversations: int
    table_bytes: float
    all_bytes: float
    policy_bytes: float
    resident_bytes: float
    lookup_us: tuple[float, float]
    absent_us: tuple[float, float]
    insert_us: float  # a block, in chains of 50
    remove_us: float  # a block, in chains of 50
    doubling_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # one size, in a process of its own
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asdict(measure(args.one, args.rounds))))
        return
    points = [_apart(size, args.rounds) for size in args.sizes]
    report(points)
    if args.json:
        args.json.write_text(json.dumps([asdict(point) for point in points], indent=1))
    if args.plot:
        from benchmarks.store_plots import plot_index

        plot_index(points, args.plot)


def report(points: Sequence[Point]) -> None:
    print(
        "| blocks | table B | all B | policy B | resident B | lookup of 2,000 us | absent us | insert us | remove us "
        "| doubling ms |\n|" + "---|" * 10
    )
    for p in points:
        print(
            f"| {p.num_blocks:,} | {p.table_bytes:.0f} | {p.all_bytes:.0f} | {p.policy_bytes:.0f} "
            f"| {p.resident_bytes:.0f} | {p.lookup_us[0]:.0f} (to {p.lookup_us[1]:.0f}) "
            f"| {p.absent_us[0]:.0f} (to {p.absent_us[1]:.0f}) | {p.insert_us:.1f} | {p.remove_us:.1f} "
            f"| {p.doubling_ms:.0f} |"
        )


def measure(num_blocks: int, rounds: int) -> Point:
    resident = _resident_bytes()
    index, long_chains, insert_s = _fill(num_blocks)
    policy = make_policy("lfu", index, {"dram": num_blocks, "disk": num_blocks}, 0.25)
    entries = index.entries()
    for some in np.array_split(entries, max(1, len(entries) // 64)):
        policy.added(some, "dram")
    resident = _resident_bytes() - resident
    rng = np.random.default_rng(2)
    lookups = [long_chains[i] for i in rng.integers(0, len(long_chains), rounds)]
    absent = [rng.bytes(32 * LONG) for _ in range(rounds)]
    num_blocks, num_talks, table_bytes = len(index), len(index.conversations), index.num_bytes
    found_us = _times_us(index.longest_prefix, lookups)
    absent_us = _times_us(index.longest_prefix, absent)
    policy_bytes = policy.num_bytes
    policy.removed(entries)
    index.dram[entries] = -1
    remove_us = _remove_us(index)
    del index, policy
    return Point(
        num_blocks=num_blocks,
        num_conversations=num_talks,
        table_bytes=table_bytes / num_blocks,
        all_bytes=_allocated_bytes(num_blocks) / num_blocks,
        policy_bytes=policy_bytes / num_blocks,
        resident_bytes=resident / num_blocks,
        lookup_us=found_us,
        absent_us=absent_us,
        insert_us=1e6 * insert_s / num_blocks,
        remove_us=remove_us,
        doubling_ms=_doubling_ms(num_blocks),
    )


def _fill(num_blocks: int) -> tuple[BlockIndex, list[bytes], float]:
    """The index, its long chains, and the seconds that inserting took."""
    rng = np.random.default_rng(1)
    index = BlockIndex(num_blocks)
    long_chains = [rng.bytes(32 * LONG) for _ in range(max(1, num_blocks // 20 // LONG))]
    for i, chain in enumerate(long_chains):
        index.dram[index.insert(chain, ROOT, 0, "tenant", f"long {i}")] = 0
    shared = [rng.bytes(32 * SHARED) for _ in range(min(NUM_SHARED, num_blocks // 20 // SHARED))]
    talk, seconds = 0, 0.0
    while (left := num_blocks - len(index)) > 0:
        beginning = shared[talk % len(shared)]
        chain = beginning + rng.bytes(32 * min(OWN, left))
        began = time.thread_time()
        entries = index.insert(chain, ROOT, 0, "tenant", f"talk {talk}")
        seconds += time.thread_time() - began
        index.dram[entries] = 0
        talk += 1
    return index, long_chains, seconds


def _times_us(look: Callable[[bytes], object], chains: Sequence[bytes]) -> tuple[float, float]:
    times = []
    for chain in chains:
        began = time.perf_counter()
        look(chain)
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times), max(times)


def _remove_us(index: BlockIndex) -> float:
    """A block, over the ends of up to 200 conversations."""
    talks = [one for one in index.conversations.list(limit=400) if one.name.startswith("talk")][:200]
    chains = [index.conversations.deletable(one.tenant, one.name) for one in talks]
    began = time.thread_time()
    for chain in chains:
        index.remove(chain)
    return 1e6 * (time.thread_time() - began) / max(1, sum(map(len, chains)))


def _doubling_ms(num_blocks: int) -> float:
    """Of an index that is full at the next power of two, where columns and table both have no room for one more."""
    full = 1 << (num_blocks - 1).bit_length()
    index, rng = BlockIndex(full), np.random.default_rng(3)
    while len(index) < full:
        index.insert(rng.bytes(32 * min(LONG, full - len(index))), ROOT, 0)
    chain = rng.bytes(32)
    began = time.thread_time()
    index.insert(chain, ROOT, 0)
    return 1e3 * (time.thread_time() - began)


def _allocated_bytes(num_blocks: int) -> int:
    tracemalloc.start()
    index, _, _ = _fill(num_blocks)
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    index.check()
    return allocated


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _apart(size: int, rounds: int) -> Point:
    command = [sys.executable, "-m", "benchmarks.store_index", "--one", str(size), "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    found = json.loads(done.stdout)
    return Point(**{key: tuple(value) if isinstance(value, list) else value for key, value in found.items()})


if __name__ == "__main__":
    main()
