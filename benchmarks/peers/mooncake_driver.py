"""Puts and gets in Mooncake Store, in its own environment (peers/mooncake.py makes it). A driver (store_lines).

    python -m benchmarks.peers.mooncake_driver tcp --master HOST:PORT --port PORT --size 1MiB --mib 256
    python -m benchmarks.peers.mooncake_driver shm --master HOST:PORT --port PORT-OF-MOONCAKE_CLIENT --size …
    python -m benchmarks.peers.mooncake_driver segment --master HOST:PORT --port PORT --mib MIB     what tcp puts into

A request is one batch_put_from or batch_get_into. As with every store, what was got is compared after the time.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import sys
import time
from typing import Any, TextIO

import numpy as np
from mooncake.store import MooncakeDistributedStore

from benchmarks.store_bytes import Bytes
from benchmarks.store_lines import own_stdout, serve
from benchmarks.store_values import MIB, SIZES, Load

BUFFER_BYTES = 64 * MIB  # of the client's own; values don't go through it

_LASTING: list[Any] = []


class Mooncake:
    """A Store. `address`: of 2 * load.total_bytes that the client can reach."""

    def __init__(self, load: Load, client: Any, address: int) -> None:
        self._load = load
        self._client = client
        size = 2 * load.total_bytes
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        self._bytes = Bytes(load, memory)
        self._sources = [address + i * load.size.value_bytes for i in range(2 * load.num_values)]
        _done(client.register_buffer(address, size), "register_buffer")

    def put(self, turn: int) -> float:
        self._bytes.stamp(turn)
        began = time.perf_counter()
        for values in self._load.requests():
            keys, sizes = self._keys(turn, values), [self._load.size.value_bytes] * len(values)
            for code in self._client.batch_put_from(keys, self._sources[values.start : values.stop], sizes):
                _done(code, "batch_put_from")
        return time.perf_counter() - began

    def get(self, turn: int) -> float:
        self._bytes.blank()
        targets = self._sources[self._load.num_values :]
        began = time.perf_counter()
        for values in self._load.requests():
            keys, sizes = self._keys(turn, values), [self._load.size.value_bytes] * len(values)
            got = self._client.batch_get_into(keys, targets[values.start : values.stop], sizes)
            if got != sizes:
                raise RuntimeError(f"batch_get_into: {got}")
        seconds = time.perf_counter() - began
        self._bytes.check()
        return seconds

    def clear(self, turn: int) -> None:
        self._client.remove_all(True)

    def _keys(self, turn: int, values: range) -> list[str]:
        return [f"{turn}/{i}" for i in values]


def _done(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what}: {code}")


def opened(way: str, master: str, port: int, load: Load) -> Mooncake:
    client = MooncakeDistributedStore()
    size = 2 * load.total_bytes
    if way == "shm":
        _done(client.setup_dummy(size + BUFFER_BYTES, BUFFER_BYTES, f"127.0.0.1:{port}"), "setup_dummy")
        return Mooncake(load, client, client.alloc_from_mem_pool(size))
    _done(client.setup(f"127.0.0.1:{port}", "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", master), "setup")
    return Mooncake(load, client, lasting(size))


def lasting(size: int) -> int:
    """Address of memory that stays until this process ends."""
    memory = (ctypes.c_uint8 * size).from_buffer(mmap.mmap(-1, size))
    _LASTING.append(memory)
    return ctypes.addressof(memory)


def hold_segment(master: str, port: int, size: int, answers: TextIO) -> None:
    store = MooncakeDistributedStore()
    _done(store.setup(f"127.0.0.1:{port}", "P2PHANDSHAKE", size, BUFFER_BYTES, "tcp", "", master), "setup")
    print('{"ready": true}', file=answers)
    sys.stdin.read()
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=["tcp", "shm", "segment"])
    parser.add_argument("--master", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--mib", type=int, required=True)
    a = parser.parse_args()
    answers = own_stdout()
    if a.way == "segment":
        hold_segment(a.master, a.port, a.mib * MIB, answers)
    else:
        serve(opened(a.way, a.master, a.port, Load(SIZES[a.size], a.mib * MIB)), answers)


if __name__ == "__main__":
    main()
