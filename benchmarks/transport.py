"""Transports between two processes, against the plain thing each is made of, interleaved in one run.

    python benchmarks/transport.py [--rounds 7] [--json FILE]

Throughput at 64 KiB, 1 MiB and 16 MiB a lease: shm against memcpy (numpy copyto, one thread), tcp against a plain
loopback socket (sendall, recv_into). "acknowledged": one lease at a time, each committed and confirmed before the
next; "streamed": eight in flight. The checksum, always on in service, is switched off in every second cell to show its
cost; memcpy is shown with it too. CPU is of both processes together.

Then the hand-over: 32 blocks of a 135M model (30 layers, 11.8 MB), written in groups of layers while a forward pass is
pretended; the time from the last write to the confirmed commit is what the second token waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import mmap
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np

from distserve.kv.checksum import Words, partial_sums
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout, RemoteRegion
from distserve.transport.base import Lease, PoolMemory, Sender, Span
from distserve.transport.factory import KINDS, make_receiver, make_sender
from distserve.transport.rows import PoolRows

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB}
PLAIN = KVLayout(weights="b", dtype="bfloat16", num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, rope="")
MODEL = KVLayout(weights="m", dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, rope="")
POOL_BYTES = 256 * MIB  # more than caches hold
CELL_BYTES = 128 * MIB  # moved in one cell
DEPTH = 8


@contextmanager
def pool(layout: KVLayout) -> Iterator[PoolMemory]:
    num_blocks = POOL_BYTES // block_bytes(layout)
    fd = os.memfd_create("kv-bench", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_blocks * block_bytes(layout))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    region = mmap.mmap(fd, num_blocks * block_bytes(layout))
    blocks = np.frombuffer(region, np.uint8).reshape(num_blocks, layout.num_layers, layer_block_bytes(layout))
    blocks[:] = 1  # every byte touched: no first-use faults in the figures
    yield PoolMemory(layout=layout, blocks=blocks, fd=fd)
    os.close(fd)


def set_checksums(on: bool) -> None:
    """In this process. Off is for this benchmark alone."""
    PoolRows.sums = _SUMS if on else _no_sums  # type: ignore[method-assign]


_SUMS = PoolRows.sums


def _no_sums(self: PoolRows, first: int, count: int, layer_start: int, layer_stop: int) -> Words:
    return np.zeros(count, np.uint64)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# ---------------------------------------------------------------- the receiving process


async def serve() -> None:
    """One JSON request a line: {"grant": [kind, layout, blocks a lease, leases]}, {"sums": bool}, {"cpu": 1},
    {"drain": [bytes, times]} (a plain socket). One JSON answer a line."""
    with pool(PLAIN) as plain, pool(MODEL) as model:
        memories = {"plain": plain, "model": model}
        receivers = {(k, m): make_receiver(k, memory) for k in KINDS for m, memory in memories.items()}
        for receiver in receivers.values():
            await receiver.start(lambda commit: None, lambda lease_id, e: print(lease_id, e, file=sys.stderr))
        listener = socket.create_server(("127.0.0.1", 0))
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        print(listener.getsockname()[1], flush=True)
        epoch, plain_peer = 0, None
        while line := await lines.readline():
            (verb, value), *_ = json.loads(line).items()
            answer: object = None
            if verb == "grant":
                kind, name, n, count = value
                num_blocks, regions = len(memories[name].blocks), []
                for i in range(count):
                    epoch += 1
                    first = 1 + i * n % (num_blocks - n)
                    lease = Lease(i + 1, epoch, list(range(first, first + n)), 600.0)
                    regions.append(msgspec.to_builtins(receivers[kind, name].grant(lease)))
                answer = regions
            elif verb == "sums":
                set_checksums(value)
            elif verb == "cpu":
                answer = cpu_s()
            elif verb == "drain":
                plain_peer = plain_peer or listener.accept()[0]
                asyncio.get_running_loop().run_in_executor(
                    None, drain, plain_peer, plain.blocks.reshape(-1).data, *value
                )
            print(json.dumps(answer), flush=True)
        for receiver in receivers.values():
            await receiver.stop()


def drain(sock: socket.socket, memory: memoryview, size: int, times: int) -> None:
    """Receives into fresh memory each time and acknowledges with a byte."""
    for i in range(times):
        start = i * size % (len(memory) - size)
        view, done = memory[start : start + size], 0
        while done < size:
            done += sock.recv_into(view[done:])
        sock.sendall(b"k")


# ---------------------------------------------------------------- the sending process


class Far:
    """The receiving process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__, "--serve"], stdin=-1, stdout=-1, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self.socket = socket.create_connection(("127.0.0.1", int(self._out.readline())))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, verb: str, value: object = 1) -> object:
        self._in.write(json.dumps({verb: value}) + "\n")
        self._in.flush()
        return json.loads(self._out.readline())

    def grant(self, kind: str, name: str, n: int, count: int) -> list[RemoteRegion]:
        return msgspec.convert(self.ask("grant", [kind, name, n, count]), list[RemoteRegion])

    def close(self) -> None:
        self.socket.close()
        self._in.close()
        self._process.wait(30)


async def send_leases(sender: Sender, regions: Sequence[RemoteRegion], num_layers: int, depth: int) -> None:
    queue = iter(regions)

    async def lane() -> None:
        for region in queue:
            transfer = await sender.open(region, timeout_s=10)
            ids = tuple(region.block_ids)
            transfer.write([Span(0, num_layers, ids, tuple(range(len(ids))))])
            await transfer.commit(b"", timeout_s=60)

    await asyncio.gather(*(lane() for _ in range(depth)))


def plain_copies(source: PoolMemory, target: PoolMemory, size: int, count: int, summed: bool) -> None:
    a, b = source.blocks.reshape(-1).view(np.uint64), target.blocks.reshape(-1).view(np.uint64)
    words = size // 8
    for i in range(count):
        start = i * words % (len(a) - words)
        np.copyto(b[start : start + words], a[start : start + words])
        if summed:
            partial_sums(b[start : start + words].reshape(-1, PLAIN_WORDS), 0, PLAIN_WORDS)


PLAIN_WORDS = block_bytes(PLAIN) // 8


def plain_socket(far: Far, memory: PoolMemory, size: int, count: int, depth: int) -> None:
    far.ask("drain", [size, count])
    flat, acknowledged = memory.blocks.reshape(-1).data, 0
    for i in range(count):
        start = i * size % (len(flat) - size)
        far.socket.sendall(flat[start : start + size])
        while i - acknowledged >= depth - 1 and acknowledged < count:
            acknowledged += len(far.socket.recv(4096))
    while acknowledged < count:
        acknowledged += len(far.socket.recv(4096))


async def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """{cell: {"GB/s": [...], "CPU ns/KiB": [...]}}"""
    far = Far()
    found: dict[str, dict[str, list[float]]] = {}
    with pool(PLAIN) as memory, pool(PLAIN) as other, pool(MODEL) as model:
        senders = {k: make_sender(k, memory, sender_id="bench") for k in KINDS}

        async def cell(name: str, total: int, work: Callable[[], object]) -> None:
            cpu, started = cpu_s() + float(str(far.ask("cpu"))), time.perf_counter()
            if asyncio.iscoroutine(result := work()):
                await result
            seconds = time.perf_counter() - started
            cpu = cpu_s() + float(str(far.ask("cpu"))) - cpu
            figures = found.setdefault(name, {"GB/s": [], "CPU ns/KiB": []})
            figures["GB/s"].append(total / seconds / 1e9)
            figures["CPU ns/KiB"].append(cpu / total * KIB * 1e9)

        for turn in range(rounds + 1):
            if turn == 1:
                found.clear()  # the first round warms up
            for label, size in SIZES.items():
                count = max(8, CELL_BYTES // size)
                for summed in (False, True):
                    name = f"memcpy{' + sum' if summed else ''}|{label}"
                    await cell(name, size * count, partial(plain_copies, memory, other, size, count, summed))
                for depth, mode in ((1, "acknowledged"), (DEPTH, "streamed")):
                    work = partial(plain_socket, far, memory, size, count, depth)
                    await cell(f"socket {mode}|{label}", size * count, work)
                    for on in (True, False):
                        far.ask("sums", on)
                        set_checksums(on)
                        for kind in KINDS:
                            regions = far.grant(kind, "plain", size // block_bytes(PLAIN), count)
                            name = f"{kind} {mode}{'' if on else ', no sums'}|{label}"
                            await cell(name, size * count, partial(send_leases, senders[kind], regions, 4, depth))
                    far.ask("sums", True)
                    set_checksums(True)
        await hand_over(far, model, rounds)
        for sender in senders.values():
            await sender.stop()
    far.close()
    return found


async def hand_over(far: Far, memory: PoolMemory, rounds: int) -> None:
    print("\nHand-over of 512 tokens (32 blocks, 30 layers, 11.8 MB): last write to confirmed commit, ms")
    for kind in KINDS:
        sender = make_sender(kind, memory, sender_id="bench-model")
        for group in (1, 5, 30):
            left, writes = [], []
            for region in far.grant(kind, "model", 32, 4 * rounds):
                transfer = await sender.open(region, timeout_s=10)
                for layer in range(0, 30, group):
                    await asyncio.sleep(0.003 * group)  # the forward pass computes these layers
                    began = time.perf_counter()
                    transfer.write([Span(layer, layer + group, tuple(region.block_ids), tuple(range(32)))])
                    writes.append(time.perf_counter() - began)
                await transfer.commit(b"", timeout_s=10)
                left.append((time.perf_counter() - began) * 1e3)
            best, middle, worst = min(left), statistics.median(left), max(left)
            print(
                f"  {kind}, {group:2} layers a write: best {best:.2f}, median {middle:.2f}, worst {worst:.2f}; "
                f"write() returns in {statistics.median(writes) * 1e6:.0f} us"
            )
        await sender.stop()


def report(found: dict[str, dict[str, list[float]]]) -> None:
    def middle(name: str, figure: str = "GB/s") -> float:
        return statistics.median(found[name][figure])

    print(f"\n{'GB/s, median (lowest–highest), CPU ns/KiB':44}" + "".join(f"{label:>28}" for label in SIZES))
    for row in dict.fromkeys(name.split("|")[0] for name in found):
        cells = ""
        for label in SIZES:
            values = found[f"{row}|{label}"]["GB/s"]
            cpu = middle(f"{row}|{label}", "CPU ns/KiB")
            cells += f"{statistics.median(values):8.2f} ({min(values):5.2f}–{max(values):5.2f}) {cpu:5.0f}"
        print(f"{row:44}{cells}")
    print(f"\n{'Ratio to the plain thing (of medians)':44}" + "".join(f"{label:>28}" for label in SIZES))
    for mode in ("acknowledged", "streamed"):
        for sums in ("", ", no sums"):
            for kind, against in (("shm", "memcpy"), ("tcp", f"socket {mode}")):
                ratios = [middle(f"{kind} {mode}{sums}|{s}") / middle(f"{against}|{s}") for s in SIZES]
                name = f"{kind} {mode}{sums} / {against}"
                print(f"{name:44}" + "".join(f"{ratio:28.2f}" for ratio in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, load {load:.2f}, {arguments.rounds} rounds, pools of {POOL_BYTES >> 20} MiB")
    found = asyncio.run(measure(arguments.rounds))
    report(found)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
