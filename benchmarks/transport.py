"""Transports between two processes, against the plain thing each is made of, interleaved in one run.

    python -m benchmarks.transport [--rounds 15] [--json FILE]        (about 3 minutes)

The sending and the receiving process are separate, as in service, each with the event loop that services use. In each
round every cell is measured once, so that a ratio is of figures taken seconds apart: it is made within each round,
and the median (lowest to highest) of the rounds is shown.

What stands beside what:
  memcpy   numpy copyto (libc memmove), one thread of one process, from pool to pool. Both pools are larger than the
           caches and walked through in turn, as leases walk through them. "cached" copies one piece again and again.
  socket   a plain TCP connection over loopback between the same two processes, blocking, TCP_NODELAY and the same
           IP_TOS as the transport's: sendmsg out of the pool, recv_into its own pool, a byte of acknowledgement for
           each piece; as many pieces in flight as the transport has leases.
  checksum partial_sums over the pool, one thread: what a sender computes for each lease. Receivers compute it over
           bytes that were just copied.
  shm, tcp leases opened, written, committed and acknowledged; checksums on. "1 in flight": each confirmed before
           the next is opened. "4 in flight": what a busy prefill worker does.

CPU is of all threads of a process, user and system, per KiB or per block of the lease; grants, which come by the bus,
are made before. THE HEADLINE is the throughput of a stream of 1 MiB leases (16 blocks of 64 KiB), 4 in flight:
shm / memcpy and tcp / socket.

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
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from distserve.kv.checksum import partial_sums
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.lifecycle import Shutdown, run_service
from distserve.messages import KVLayout, RemoteRegion
from distserve.transport.base import Lease, PoolMemory, Sender, Span
from distserve.transport.factory import make_receiver, make_sender
from distserve.transport.options import DSCP

KINDS = ("shm", "tcp")
KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB}
DEPTHS = (1, 4)
POOL_BYTES = 256 * MIB  # more than caches hold
CELL_BYTES = 128 * MIB  # moved in one cell
LAYOUTS = {
    "64 KiB": KVLayout(
        weights="b", dtype="bfloat16", num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, rope=""
    ),
    "4 KiB": KVLayout(weights="s", dtype="bfloat16", num_layers=4, num_kv_heads=1, head_dim=16, block_size=16, rope=""),
    "model": KVLayout(
        weights="m", dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, rope=""
    ),
}
PLAIN = "64 KiB"  # the blocks of the table of lease sizes


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


def block_lists(num_blocks: int, a_lease: int, count: int, scattered: bool, seed: int) -> list[list[int]]:
    """Block ids of `count` leases, walking through the pool; neighbours, or in random order."""
    order = np.arange(1, num_blocks)
    if scattered:
        np.random.default_rng(seed).shuffle(order)
    starts = [i * a_lease % (len(order) - a_lease + 1) for i in range(count)]
    return [order[start : start + a_lease].tolist() for start in starts]


# ---------------------------------------------------------------- the receiving process


async def serve(shutdown: Shutdown) -> None:
    """One JSON request a line, one JSON answer a line: {"grant": [kind, layout, blocks a lease, leases, scattered]},
    {"cpu": 1}, {"drain": [bytes, times]} (a plain socket)."""
    with ExitStack() as stack:
        memories = {name: stack.enter_context(pool(layout)) for name, layout in LAYOUTS.items()}
        receivers = {(k, m): make_receiver(k, memory) for k in KINDS for m, memory in memories.items()}
        for receiver in receivers.values():
            await receiver.start(lambda commit: None, lambda lease_id, epoch, e: print(lease_id, e, file=sys.stderr))
        listener = socket.create_server(("127.0.0.1", 0))
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        print(listener.getsockname()[1], flush=True)
        epoch, peer = 0, None
        while line := await lines.readline():
            (verb, value), *_ = json.loads(line).items()
            answer: object = None
            if verb == "grant":
                kind, name, n, count, scattered = value
                regions = []
                for i, ids in enumerate(block_lists(len(memories[name].blocks), n, count, scattered, seed=2)):
                    epoch += 1
                    regions.append(msgspec.to_builtins(receivers[kind, name].grant(Lease(i + 1, epoch, ids, 600.0))))
                answer = regions
            elif verb == "cpu":
                answer = time.process_time()
            elif verb == "drain":
                if peer is None:
                    peer = listener.accept()[0]
                    mark(peer)
                flat = memories[PLAIN].blocks.reshape(-1).data
                asyncio.get_running_loop().run_in_executor(None, drain, peer, flat, *value)
            print(json.dumps(answer), flush=True)
        for receiver in receivers.values():
            await receiver.stop()


def mark(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, DSCP["prefill"] << 2)


def drain(sock: socket.socket, memory: memoryview, size: int, times: int) -> None:
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
        command = [sys.executable, "-m", "benchmarks.transport", "--serve"]
        self._process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, cwd=Path(__file__).parents[1])
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self.socket = socket.create_connection(("127.0.0.1", int(self._out.readline())))
        mark(self.socket)

    def ask(self, verb: str, value: object = 1) -> object:
        self._in.write(json.dumps({verb: value}) + "\n")
        self._in.flush()
        return json.loads(self._out.readline())

    def cpu_s(self) -> float:
        return float(str(self.ask("cpu")))

    def grant(self, kind: str, name: str, n: int, count: int, scattered: bool = False) -> list[RemoteRegion]:
        return msgspec.convert(self.ask("grant", [kind, name, n, count, scattered]), list[RemoteRegion])

    def close(self) -> None:
        self.socket.close()
        self._in.close()
        self._process.wait(30)


async def send_leases(
    sender: Sender, regions: Sequence[RemoteRegion], sources: Sequence[list[int]], num_layers: int, depth: int
) -> None:
    queue = iter(zip(regions, sources, strict=True))

    async def lane() -> None:
        for region, ids in queue:
            transfer = await sender.open(region, timeout_s=10)
            transfer.write([Span(0, num_layers, tuple(ids), tuple(range(len(ids))))])
            await transfer.commit(b"", timeout_s=60)

    await asyncio.gather(*(lane() for _ in range(depth)))


def plain_copies(source: PoolMemory, target: PoolMemory, size: int, count: int, cached: bool) -> None:
    a, b = source.blocks.reshape(-1).view(np.uint64), target.blocks.reshape(-1).view(np.uint64)
    words = size // 8
    for i in range(count):
        start = 0 if cached else i * words % (len(a) - words)
        np.copyto(b[start : start + words], a[start : start + words])


def plain_sums(source: PoolMemory, size: int, count: int) -> None:
    words = block_bytes(source.layout) // 8
    rows = source.blocks.reshape(-1).view(np.uint64).reshape(-1, words)
    n = size // 8 // words
    for i in range(count):
        start = i * n % (len(rows) - n)
        partial_sums(rows[start : start + n], 0, words)


def plain_socket(far: Far, memory: PoolMemory, size: int, count: int, depth: int) -> None:
    far.ask("drain", [size, count])
    flat, acknowledged = memory.blocks.reshape(-1).data, 0
    for i in range(count):
        start = i * size % (len(flat) - size)
        view, done = flat[start : start + size], 0
        while done < size:
            done += far.socket.sendmsg([view[done:]])
        while i + 1 - acknowledged >= depth:
            acknowledged += len(far.socket.recv(4096))
    while acknowledged < count:
        acknowledged += len(far.socket.recv(4096))


class Figures:
    """One cell's, a value a round."""

    def __init__(self) -> None:
        self.gb_per_s: list[float] = []
        self.sender_ns_per_byte: list[float] = []
        self.receiver_ns_per_byte: list[float] = []


async def measure(rounds: int, found: dict[str, Figures]) -> None:
    far = Far()
    with ExitStack() as stack:
        memories = {name: stack.enter_context(pool(layout)) for name, layout in LAYOUTS.items()}
        memory, other = memories[PLAIN], stack.enter_context(pool(LAYOUTS[PLAIN]))
        senders = {(k, m): make_sender(k, memories[m], sender_id=f"bench {m}") for k in KINDS for m in memories}

        async def cell(name: str, total: int, work: Callable[[], Awaitable[None] | None]) -> None:
            far_s, near_s, started = far.cpu_s(), time.process_time(), time.perf_counter()
            if (awaitable := work()) is not None:
                await awaitable
            seconds = time.perf_counter() - started
            near_s = time.process_time() - near_s
            figures = found.setdefault(name, Figures())
            figures.gb_per_s.append(total / seconds / 1e9)
            figures.sender_ns_per_byte.append(near_s / total * 1e9)
            figures.receiver_ns_per_byte.append((far.cpu_s() - far_s) / total * 1e9)

        async def leases(name: str, kind: str, layout: str, size: int, depth: int, scattered: bool) -> None:
            n, count = size // block_bytes(LAYOUTS[layout]), max(8, CELL_BYTES // size)
            regions = far.grant(kind, layout, n, count, scattered)
            ids = block_lists(len(memories[layout].blocks), n, count, scattered, seed=1)
            await cell(name, size * count, partial(send_leases, senders[kind, layout], regions, ids, 4, depth))

        for turn in range(rounds + 1):
            if turn == 1:
                found.clear()  # the first round warms up
            for label, size in SIZES.items():
                count = max(8, CELL_BYTES // size)
                for name, cached in (("memcpy", False), ("memcpy, cached", True)):
                    await cell(
                        f"{name}|{label}", size * count, partial(plain_copies, memory, other, size, count, cached)
                    )
                await cell(f"checksum|{label}", size * count, partial(plain_sums, memory, size, count))
                for depth in DEPTHS:
                    work = partial(plain_socket, far, memory, size, count, depth)
                    await cell(f"socket, {depth} in flight|{label}", size * count, work)
                    for kind in KINDS:
                        await leases(f"{kind}, {depth} in flight|{label}", kind, PLAIN, size, depth, False)
            for layout in ("4 KiB", "64 KiB"):
                for scattered, order in ((False, "neighbours"), (True, "scattered")):
                    for kind in KINDS:
                        await leases(f"{kind}, blocks of {layout}, {order}", kind, layout, MIB, 4, scattered)
        await hand_over(far, senders, rounds)
        for sender in senders.values():
            await sender.stop()
    far.close()


async def hand_over(far: Far, senders: dict[tuple[str, str], Sender], rounds: int) -> None:
    print("\nHand-over of 512 tokens (32 blocks, 30 layers, 11.8 MB): last write to confirmed commit, ms")
    for kind in KINDS:
        for group in (1, 5, 30):
            left, writes = [], []
            for region in far.grant(kind, "model", 32, 2 * rounds):
                transfer = await senders[kind, "model"].open(region, timeout_s=10)
                for layer in range(0, 30, group):
                    await asyncio.sleep(0.003 * group)  # the forward pass computes these layers
                    began = time.perf_counter()
                    transfer.write([Span(layer, layer + group, tuple(region.block_ids), tuple(range(32)))])
                    writes.append(time.perf_counter() - began)
                await transfer.commit(b"", timeout_s=10)
                left.append((time.perf_counter() - began) * 1e3)
            print(
                f"  {kind}, {group:2} layers a write: {spread(left)}; "
                f"write() returns in {statistics.median(writes) * 1e6:.0f} us"
            )


# ---------------------------------------------------------------- the tables


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):6.2f} ({min(values):5.2f} to {max(values):5.2f})"


def ratios(a: Figures, b: Figures) -> list[float]:
    return [x / y for x, y in zip(a.gb_per_s, b.gb_per_s, strict=True)]


def report(found: dict[str, Figures]) -> None:
    def row(name: str, cells: Sequence[str]) -> None:
        print(f"{name:34}" + "".join(f"{cell:>27}" for cell in cells))

    def cpu_us(values: Sequence[float], num_bytes: int) -> str:
        return f"{statistics.median(values) * num_bytes / 1e3:.2f}"

    names = list(dict.fromkeys(name.split("|")[0] for name in found if "|" in name))
    print()
    row("GB/s, median (lowest to highest)", list(SIZES))
    for name in names:
        row(name, [spread(found[f"{name}|{label}"].gb_per_s) for label in SIZES])
    print()
    row("CPU us per KiB, sender | receiver", list(SIZES))
    for name in names:
        cells = [found[f"{name}|{label}"] for label in SIZES]
        sides = [(cpu_us(c.sender_ns_per_byte, KIB), cpu_us(c.receiver_ns_per_byte, KIB)) for c in cells]
        row(name, [" | ".join(side) for side in sides])
    print()
    row("CPU us per block, 1 MiB leases", ["sender | receiver", "GB/s"])
    for name, figures in found.items():
        if "blocks of" in name:
            size = block_bytes(LAYOUTS[name.split("blocks of ")[1].split(",")[0]])
            sides = cpu_us(figures.sender_ns_per_byte, size), cpu_us(figures.receiver_ns_per_byte, size)
            row(name, [" | ".join(sides), spread(figures.gb_per_s)])
    print()
    row("Ratio of throughputs", list(SIZES))
    for depth in DEPTHS:
        for kind, against in (("shm", "memcpy"), ("tcp", f"socket, {depth} in flight")):
            name = f"{kind}, {depth} in flight"
            cells = [spread(ratios(found[f"{name}|{s}"], found[f"{against}|{s}"])) for s in SIZES]
            row(f"{name} / {against.split(',')[0]}", cells)
    print("\nHeadline: 1 MiB leases, 4 in flight")
    for kind, against, aim in (("shm", "memcpy", 0.8), ("tcp", "socket, 4 in flight", 0.9)):
        ours, plain = found[f"{kind}, 4 in flight|1 MiB"], found[f"{against}|1 MiB"]
        both = [
            statistics.median([s + r for s, r in zip(f.sender_ns_per_byte, f.receiver_ns_per_byte, strict=True)])
            for f in (ours, plain)
        ]
        print(
            f"  {kind} / {against.split(',')[0]}: {spread(ratios(ours, plain))}, aim {aim}; "
            f"CPU of both processes {both[0] / both[1]:.2f} times the plain one's"
        )


def busy_s() -> float:
    """CPU time that this machine has spent on anything, what the hypervisor took away included."""
    user, nice, system, _, _, irq, softirq, steal, *_ = (
        int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        run_service(serve, grace_s=1)
        return
    found: dict[str, Figures] = {}

    async def work(shutdown: Shutdown) -> None:
        await measure(arguments.rounds, found)

    print(f"{os.cpu_count()} CPUs, {platform.machine()}, Linux {platform.release()}, {arguments.rounds} rounds")
    busy, started = busy_s(), time.monotonic()
    run_service(work, grace_s=1)
    ours = sum(os.times()[:4])  # the receiving process has been waited for
    others = max(0.0, busy_s() - busy - ours) / (time.monotonic() - started)
    report(found)
    print(f"\n{time.monotonic() - started:.0f} s; others kept {others:.2f} CPUs busy meanwhile (quiet: below 0.05)")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({name: vars(figures) for name, figures in found.items()}, indent=1))


if __name__ == "__main__":
    main()
