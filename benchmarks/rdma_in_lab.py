"""rdma against tcp between two hosts of the lab: what a block and a byte cost on either side, as ratios.

    python -m benchmarks.rdma_in_lab receive NATS_URL      on one host; ends with its standard input
    python -m benchmarks.rdma_in_lab send NATS_URL [--rounds 5]      on the other; prints the table

`deploy/roce-lab/lab.py up --bare` boots the hosts and starts no services; RESULTS.md has the lines to type. Both are
emulated and Soft-RoCE does a card's work on their CPU, so seconds mean nothing and neither does rdma's ratio of them:
what carries over to a card is the cost of our own process (`own CPU`), and the counts of what it asks of the device.
Rounds of both transports are interleaved. CPU of the host is all of it but idle, interrupts and Soft-RoCE included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from distserve.bus.base import Delivery
from distserve.bus.nats import NatsBus
from distserve.messages import KVLayout, RemoteRegion
from distserve.transport.base import Lease, PoolMemory, Receiver, Sender, Span
from distserve.transport.factory import make_receiver, make_sender
from distserve.transport.options import StreamOptions
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.receiver import RdmaReceiver
from distserve.transport.rdma.sender import RdmaSender

SUBJECT = "benchmark.rdma"
KINDS = ("tcp", "rdma")
OPTIONS = StreamOptions(connect_timeout_s=30, peer_timeout_s=30, abort_timeout_s=30)


def layout(num_layers: int, head_dim: int) -> KVLayout:
    return KVLayout(
        weights="b",
        dtype="float32",
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=16,
        rope="{}",
    )


# Leases of 1 MiB: its layout, its blocks, and whether they lie one after the other.
SHAPES = {
    "256 blocks of 4 KiB, scattered": (layout(2, 8), 256, False),
    "256 blocks of 4 KiB in a row": (layout(2, 8), 256, True),
    "16 blocks of 64 KiB, scattered": (layout(4, 64), 16, False),
}


def make_pool(shape: str) -> PoolMemory:
    made, num_blocks, _ = SHAPES[shape]
    block = made.num_layers * 2 * made.block_size * made.num_kv_heads * made.head_dim * 4
    blocks = np.random.default_rng(1).integers(0, 256, (2 * num_blocks + 1, block), dtype=np.uint8)
    return PoolMemory(made, blocks.reshape(2 * num_blocks + 1, made.num_layers, -1))


def ids(shape: str, seed: int) -> list[int]:
    _, num_blocks, in_a_row = SHAPES[shape]
    if in_a_row:
        return list(range(1, num_blocks + 1))
    return [int(i) + 1 for i in np.random.default_rng(seed).permutation(2 * num_blocks)[:num_blocks]]


def host_cpu_s() -> float:
    """All of this host's CPU time that was not idle (proc(5), /proc/stat: user nice system idle iowait irq softirq)."""
    with open("/proc/stat") as f:
        fields = [int(x) for x in f.readline().split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


async def receive(url: str) -> None:
    bus = await NatsBus.connect(url, name="benchmark-receive")
    receivers: dict[str, Receiver] = {}
    for shape in SHAPES:
        memory = make_pool(shape)
        for kind in KINDS:
            receiver = make_receiver(
                kind,
                memory,
                host="0.0.0.0",
                advertise=_address(),
                options=OPTIONS,
                rdma=RdmaOptions(common=OPTIONS),
                bus=bus,
            )
            await receiver.start(lambda _: None, lambda *lost: print("lost", *lost, file=sys.stderr, flush=True))
            receivers[f"{kind} {shape}"] = receiver
    serial = 0

    async def answer(delivery: Delivery) -> bytes:
        nonlocal serial
        ask = json.loads(delivery.data)
        if "grant" in ask:
            serial += 1
            region = receivers[ask["grant"]].grant(Lease(serial, serial, ids(ask["shape"], serial), 600.0))
            return msgspec.json.encode(region)
        counts = {k: asdict(r.counts) for k, r in receivers.items() if isinstance(r, RdmaReceiver)}
        return json.dumps({"own": time.process_time(), "host": host_cpu_s(), "counts": counts}).encode()

    async with await bus.serve(SUBJECT, answer):
        print("ready", flush=True)
        ended = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
        await ended.read()
    for receiver in receivers.values():
        await receiver.stop()
    await bus.close()


async def send(url: str, rounds: int) -> None:
    bus = await NatsBus.connect(url, name="benchmark-send")

    async def ask(**what: Any) -> bytes:
        return await bus.request(SUBJECT, json.dumps(what).encode(), timeout_s=60)

    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for shape, (_, num_blocks, _) in SHAPES.items():
        memory = make_pool(shape)
        senders: dict[str, Sender] = {
            kind: make_sender(kind, memory, sender_id="b", options=OPTIONS, rdma=RdmaOptions(common=OPTIONS), bus=bus)
            for kind in KINDS
        }
        for i in range(rounds + 1):  # the first is not counted: it connects
            for kind in KINDS:
                region = msgspec.json.decode(await ask(grant=f"{kind} {shape}", shape=shape), type=RemoteRegion)
                there = json.loads(await ask())
                asked = _counts(senders[kind])
                began, own, host = time.perf_counter(), time.process_time(), host_cpu_s()
                transfer = await senders[kind].open(region, timeout_s=60)
                spans = [Span(0, memory.layout.num_layers, tuple(ids(shape, 10_000 + i)), tuple(range(num_blocks)))]
                transfer.write(spans, awaited=True)
                await transfer.commit(b"", timeout_s=120)
                took = time.perf_counter() - began, time.process_time() - own, host_cpu_s() - host
                after = json.loads(await ask())
                if not i:
                    continue
                found = figures[f"{shape}|{kind}"]
                for name, value in zip(("wall", "own sender", "host sender"), took, strict=True):
                    found[name].append(value)
                found["own receiver"].append(after["own"] - there["own"])
                found["host receiver"].append(after["host"] - there["host"])
                for name, count in _counts(senders[kind]).items():
                    found[f"sender {name}"].append(count - asked[name])
                if kind == "rdma":
                    for name, count in after["counts"][f"rdma {shape}"].items():
                        found[f"receiver {name}"].append(count - there["counts"][f"rdma {shape}"][name])
        for sender in senders.values():
            await sender.stop()
    await bus.close()
    report(figures)


def report(figures: dict[str, dict[str, list[float]]]) -> None:
    """Medians; rdma over tcp with the range over the rounds."""
    for shape, (_, num_blocks, _) in SHAPES.items():
        tcp, rdma = figures[f"{shape}|tcp"], figures[f"{shape}|rdma"]
        print(f"\n{shape}: rdma / tcp, median (least to most) of {len(tcp['wall'])} rounds")
        for name in ("wall", "own sender", "own receiver", "host sender", "host receiver"):
            ratios = [a / b for a, b in zip(rdma[name], tcp[name], strict=True) if b]
            middle = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
            each = statistics.median(rdma[name]) / num_blocks * 1e6, statistics.median(tcp[name]) / num_blocks * 1e6
            print(f"  {name:14} {middle:24} {each[0]:10.0f} us a block over rdma, {each[1]:10.0f} over tcp (emulated)")
        for side in ("sender", "receiver"):
            counts = {n.split()[1]: v for n, v in rdma.items() if n.startswith(side)}
            print(f"  {side} asks: " + ", ".join(f"{statistics.median(v):.0f} {n}" for n, v in counts.items()))


def _counts(sender: Sender) -> dict[str, int]:
    return asdict(sender.counts) if isinstance(sender, RdmaSender) else {}


def _address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("10.77.0.254", 9))
        return str(s.getsockname()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("receive", "send"))
    parser.add_argument("nats_url")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    asyncio.run(receive(args.nats_url) if args.role == "receive" else send(args.nats_url, args.rounds))


if __name__ == "__main__":
    main()
