"""The floor under a decode step: every weight is read once, so no step is faster than their bytes over the bandwidth.

    python -m benchmarks.load_floor [--threads 2] [--mib 1024]

Prints bytes a second as JSON: the best of several passes that only read an array much larger than the caches, torch's
sum and dot product of float32, whichever is faster. A process of its own, so that its threads are not in the way of a
benchmark's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def read_bandwidth(threads: int, mib: int = 1024, passes: int = 8) -> float:
    """Bytes a second that `threads` cores read from memory, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.load_floor", "--threads", str(threads), "--mib", str(mib)]
    done = subprocess.run([*command, "--passes", str(passes)], check=True, capture_output=True, text=True, timeout=120)
    return float(json.loads(done.stdout)["bytes_per_s"])


def weight_bytes(folder: Path) -> int:
    """Bytes that one decode step must read: all tensors of the folder's safetensors files, without the table of
    embeddings where the output has a matrix of its own (a step reads a row of the table)."""
    tensors = {name: size for path in sorted(folder.glob("*.safetensors")) for name, size in _tensors(path).items()}
    if any(name.startswith("lm_head") for name in tensors):
        tensors = {name: size for name, size in tensors.items() if "embed_tokens" not in name}
    return sum(tensors.values())


def _tensors(path: Path) -> dict[str, int]:
    """name -> bytes, from the head of a safetensors file: 8 bytes with its length, then JSON."""
    with path.open("rb") as file:
        head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: e["data_offsets"][1] - e["data_offsets"][0] for name, e in head.items() if name != "__metadata__"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mib", type=int, default=1024, help="size of the array")
    parser.add_argument("--passes", type=int, default=8)
    a = parser.parse_args()
    print(json.dumps({"threads": a.threads, "bytes_per_s": _measured(a.threads, a.mib, a.passes)}))


def _measured(threads: int, mib: int, passes: int) -> float:
    import torch  # here: whoever only reads the sizes of files needs none

    torch.set_num_threads(threads)
    num_bytes = mib << 20
    floats = torch.ones(num_bytes // 4, dtype=torch.float32)
    ways: list[Callable[[], torch.Tensor]] = [floats.sum, lambda: floats.dot(floats)]
    best_s = math.inf
    for _ in range(passes):
        for way in ways:
            began = time.perf_counter()
            way()
            best_s = min(best_s, time.perf_counter() - began)
    return num_bytes / best_s


if __name__ == "__main__":
    main()
