"""The floor under a store's disk: one file, values written and read past the kernel's cache, one call each.

    python -m benchmarks.store_disk_floor --folder FOLDER --size 1MiB --mib 256        a driver (store_lines)

put ends with fdatasync. Where the file system has no O_DIRECT this driver does not start.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.store_bytes import Bytes
from benchmarks.store_lines import own_stdout, serve
from benchmarks.store_values import MIB, SIZES, Load


class DiskFloor:
    """A Store that keeps one turn."""

    def __init__(self, load: Load, folder: Path) -> None:
        self._load = load
        memory = mmap.mmap(-1, 2 * load.total_bytes)  # at the start of a page, as O_DIRECT wants it
        self._bytes = Bytes(load, np.frombuffer(memory, np.uint8))
        fd, path = tempfile.mkstemp(dir=folder)
        os.unlink(path)
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT)
        os.close(fd)

    def put(self, turn: int) -> float:
        self._bytes.stamp(turn)
        began = time.perf_counter()
        for i, value in enumerate(self._bytes.source):
            if os.pwrite(self._fd, value, i * self._load.size.value_bytes) != len(value):
                raise OSError("short write")
        os.fdatasync(self._fd)
        return time.perf_counter() - began

    def get(self, turn: int) -> float:
        self._bytes.blank()
        began = time.perf_counter()
        for i, value in enumerate(self._bytes.target):
            if os.preadv(self._fd, [value], i * self._load.size.value_bytes) != len(value):
                raise OSError("short read")
        seconds = time.perf_counter() - began
        self._bytes.check()
        return seconds

    def clear(self, turn: int) -> None:
        """The next turn writes over it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--mib", type=int, required=True)
    a = parser.parse_args()
    answers = own_stdout()
    serve(DiskFloor(Load(SIZES[a.size], a.mib * MIB), a.folder), answers)


if __name__ == "__main__":
    main()
