"""A process that works on a folder of blocks until it is killed, and says on its output what it begins and has done.

open HASHES            what it found
append HASHES / free HASHES / forget HASHES / compact
done                   the one before has returned
full                   or it was an append, and there was no room
"""

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from distserve.errors import DiskFull
from distserve.messages import KVLayout
from distserve_kvstore.disk import DiskOptions, DiskTier
from tests.unit.kvstore.stored_blocks import chain, found, records

LAYOUT = KVLayout(weights="c", dtype="bfloat16", num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, rope="")
OPTIONS = DiskOptions(64 << 20, 4 << 20, min_free_fraction=0.0, node="writer", sync_bytes=8 << 20)


def say(what: str, hashes: Iterable[bytes] = ()) -> None:
    print(what, *(h.hex() for h in hashes), flush=True)


def work(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    # The kernel may end a write to its own cache half-way when the process is killed; a direct one it rather finishes.
    tier, runs = DiskTier.open(folder, LAYOUT, replace(OPTIONS, direct_io="off" if seed % 3 else "auto"))
    there = found(runs)
    say("open", sorted(there))

    def do(what: str, hashes: list[bytes], call: Callable[[], object]) -> None:
        say(what, hashes)
        call()
        say("done")

    num_chains = 0
    while True:
        match rng.choice("aaaaffgcc"):
            case "a":
                num_chains += 1
                hashes = chain(f"{seed}.{num_chains}", rng.randint(1, 60))
                new = records(hashes, LAYOUT)
                say("append", hashes)
                try:
                    there.update(zip(hashes, tier.append(new), strict=True))
                except DiskFull:
                    say("full")
                    hashes = rng.sample(sorted(there), len(there) // 3)
                    do("free", hashes, lambda hashes=hashes: tier.free([there.pop(h) for h in hashes]))
                else:
                    say("done")
            case "c":
                do("compact", [], lambda: tier.compact(rng.choice([1, 2 << 20, 16 << 20])))
            case one:
                hashes = rng.sample(sorted(there), min(len(there), rng.randint(1, 20)))
                places = [there.pop(h) for h in hashes]
                if one == "f":
                    do("free", hashes, lambda places=places: tier.free(places))
                else:
                    do("forget", hashes, lambda places=places: tier.forget(places))


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
