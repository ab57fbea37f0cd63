"""The floor under a store: two processes, two shared mappings, one copy a value, and a byte each way a request.

    python -m benchmarks.store_floor --size 1MiB --mib 256        a driver (store_lines)

put: the other process copies the values out of this one's mapping into its own; get: back. No names, no checks.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import struct
import time
from multiprocessing import get_context

import numpy as np

from benchmarks.store_bytes import Bytes
from benchmarks.store_lines import own_stdout, serve
from benchmarks.store_values import MIB, SIZES, Load

_REQUEST = struct.Struct("<cI")


class Floor:
    """A Store that keeps one turn."""

    def __init__(self, load: Load) -> None:
        self._load = load
        fd = os.memfd_create("floor")
        os.ftruncate(fd, 2 * load.total_bytes)
        self._bytes = Bytes(load, np.frombuffer(mmap.mmap(fd, 2 * load.total_bytes), np.uint8))
        self._socket, far = socket.socketpair()
        self._far = get_context("fork").Process(target=copy_until_closed, args=(far, fd, load), daemon=True)
        self._far.start()
        far.close()

    def put(self, turn: int) -> float:
        self._bytes.stamp(turn)
        return self._through(b"p")

    def get(self, turn: int) -> float:
        self._bytes.blank()
        seconds = self._through(b"g")
        self._bytes.check()
        return seconds

    def clear(self, turn: int) -> None:
        """The next turn writes over it."""

    def _through(self, verb: bytes) -> float:
        began = time.perf_counter()
        for values in self._load.requests():
            self._socket.sendall(_REQUEST.pack(verb, values.start))
            if self._socket.recv(1) != b"k":
                raise RuntimeError("the other process is gone")
        return time.perf_counter() - began


def copy_until_closed(asked: socket.socket, fd: int, load: Load) -> None:
    """The other process."""
    size = load.size.value_bytes
    client = np.frombuffer(mmap.mmap(fd, 2 * load.total_bytes), np.uint64).reshape(2 * load.num_values, size // 8)
    own_fd = os.memfd_create("floor-store")
    os.ftruncate(own_fd, load.total_bytes)
    own = np.frombuffer(mmap.mmap(own_fd, load.total_bytes), np.uint64).reshape(load.num_values, size // 8)
    own[:] = 1
    while request := asked.recv(_REQUEST.size):
        verb, first = _REQUEST.unpack(request)
        for i in range(first, first + load.num_a_request):
            if verb == b"p":
                np.copyto(own[i], client[i])
            else:
                np.copyto(client[load.num_values + i], own[i])
        asked.sendall(b"k")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--mib", type=int, required=True)
    a = parser.parse_args()
    answers = own_stdout()
    serve(Floor(Load(SIZES[a.size], a.mib * MIB)), answers)


if __name__ == "__main__":
    main()
