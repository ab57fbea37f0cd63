"""Pairs of one port that talk to each other, on a real device or Soft-RoCE, and memory for them."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
from collections.abc import Callable

import numpy as np
import pytest

from distserve.transport.rdma import device, ports, verbs
from distserve.transport.rdma.device import Completion, PairAddress, PairOptions, Write

ON_A_DEVICE = [
    pytest.mark.roce,
    pytest.mark.skipif(bool(verbs.available()), reason=f"no RDMA here: {verbs.available()}"),
]

BLOCK = 4096
NUM_BLOCKS = 256
TARGET = NUM_BLOCKS // 2  # blocks from here on are written to
FLUSHED = 5
TIMEOUT_S = 20.0  # Soft-RoCE in an emulated machine


class Memory:
    """An anonymous file, mapped as a pool's is: blocks to write from and blocks to write to."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("test")
        os.ftruncate(self.fd, NUM_BLOCKS * BLOCK)
        self._map = mmap.mmap(self.fd, NUM_BLOCKS * BLOCK)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.length = len(self.bytes)
        self.bytes[: self.length // 2] = np.random.default_rng(0).integers(0, 256, self.length // 2, np.uint8)

    def block(self, index: int) -> np.ndarray:
        return self.bytes[index * BLOCK :][:BLOCK]

    def at(self, index: int) -> int:
        return self.address + index * BLOCK


def completions(nic: device.Nic, enough: Callable[[list[Completion]], bool]) -> list[Completion]:
    """All that complete until it is enough, awaited as a reactor does: poll, arm, poll, sleep on the descriptor."""
    came: list[Completion] = []
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        came += nic.poll()
        if enough(came):
            return came
        nic.arm()
        if more := nic.poll():
            came += more
            continue
        assert time.monotonic() < deadline, f"only {came} within {TIMEOUT_S} s"
        select.select([nic.fd], [], [], deadline - time.monotonic())


def several(number: int) -> Callable[[list[Completion]], bool]:
    return lambda came: len(came) >= number


def connect(nic: verbs.Nic, a: device.Pair, b: device.Pair, mtu: int = 0) -> None:
    gid = ports.choose_gid(nic.port)
    mtu = mtu or nic.mtu
    for one, other in ((a, b), (b, a)):
        one.connect(gid.index, PairAddress(gid.gid, other.qp_num, other.psn, nic.mtu), mtu=mtu)


def wired(
    nic: verbs.Nic, region: device.Region, memory: Memory, options: PairOptions | None = None, mtu: int = 0
) -> tuple[device.Pair, device.Pair]:
    a, b = (nic.pair(options or PairOptions(depth=128)) for _ in range(2))
    for index in range(8):
        b.post_receive(100 + index, memory.at(NUM_BLOCKS - 1) + 64 * index, 64, region.lkey)
    connect(nic, a, b, mtu)
    return a, b


def write(memory: Memory, region_key: int, source: int, target: int, **fields: object) -> Write:
    return Write(
        **({"wr_id": 1, "signaled": True} | fields),  # type: ignore[arg-type]
        address=memory.at(source),
        length=BLOCK,
        remote_address=memory.at(target),
        rkey=region_key,
    )
