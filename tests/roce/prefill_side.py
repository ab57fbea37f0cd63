"""The sending host of a test of two. Prints one JSON object a line; the last one is the outcome.

python -m tests.roce.prefill_side NATS_URL soak NUM_LEASES SEED    random faults; what is committed must be right
python -m tests.roce.prefill_side NATS_URL stream NUM_LEASES       eight leases open at once, each written slowly,
                                                                   so that something can happen meanwhile
python -m tests.roce.prefill_side NATS_URL victim                  one lease written for ever, to be killed
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import msgspec

from distserve.bus.nats import NatsBus
from distserve.errors import BusError, DistServeError, PoolExhausted
from distserve.kv.block_pool import BlockPool
from distserve.messages import RemoteRegion
from distserve.transport.base import PoolMemory, Span, Transfer
from distserve.transport.rdma.sender import RdmaSender
from tests.contracts.transport.pools import pool
from tests.roce.decode_side import BLOCK_BYTES, LAYOUT, NUM_BLOCKS, OPTIONS, SUBJECT, content

FAULTS = ("none",) * 8 + ("abort", "revoke", "forget a layer", "cut", "stale", "timeout")


class PrefillSide:
    def __init__(self, bus: NatsBus, memory: PoolMemory, sender: RdmaSender) -> None:
        self.bus, self.memory, self.sender = bus, memory, sender
        self.blocks = BlockPool(NUM_BLOCKS)

    async def ask(self, **what: Any) -> dict[str, Any]:
        """Waits for the other side to be there, or there again."""
        async with asyncio.timeout(120):
            while True:
                try:
                    answer = await self.bus.request(SUBJECT, json.dumps(what).encode(), timeout_s=30)
                    reply: dict[str, Any] = json.loads(answer)
                    return reply
                except BusError:
                    await asyncio.sleep(0.2)

    async def lease(self, num_blocks: int) -> RemoteRegion:
        while True:
            reply = await self.ask(op="grant", num_blocks=num_blocks)
            if reply["region"] is not None:
                return msgspec.convert(reply["region"], RemoteRegion)
            await asyncio.sleep(0.05)  # until others have given blocks back

    async def fill(self, seed: int, num_blocks: int, rng: random.Random) -> list[int]:
        while True:
            try:
                sources = self.blocks.allocate(num_blocks)
                break
            except PoolExhausted:
                await asyncio.sleep(0.01)
        rng.shuffle(sources)
        self.memory.blocks[sources] = content(seed, num_blocks)
        return sources

    def cut(self) -> None:
        """Every pair in error, as a broken network leaves them."""
        for peer in self.sender._peers.values():
            if peer.link is not None:
                for lane in list(peer.link.lanes):
                    lane.pair.fail()


async def soak(side: PrefillSide, num_leases: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    stale: list[RemoteRegion] = []

    async def one(number: int) -> None:
        fault, num_blocks = rng.choice(FAULTS), rng.randint(1, 64)
        sources = await side.fill(number, num_blocks, rng)
        region = await side.lease(num_blocks)
        name = {"lease_id": region.lease_id, "epoch": region.epoch}
        transfer: Transfer | None = None
        try:
            if fault == "stale":
                await side.ask(op="revoke", **name)
                stale.append(region)
            traffic_class = rng.choice(("prefill", "decode", "background"))
            transfer = await side.sender.open(region, timeout_s=60, traffic_class=traffic_class)  # type: ignore[arg-type]
            if rng.random() < 0.25:  # in the smallest pieces, in any order
                cells = [(layer, (i,)) for layer in range(LAYOUT.num_layers) for i in range(num_blocks)]
                rng.shuffle(cells)
            else:  # as prefill does
                everything = tuple(range(num_blocks))
                cells = [(layer, everything) for layer in range(LAYOUT.num_layers)]
            if fault == "forget a layer":
                cells.pop()
            trouble_at = rng.randrange(len(cells) + 1)
            for k in range(len(cells) + 1):
                if k == trouble_at:
                    if fault == "abort":
                        await transfer.abort("drawn")
                    elif fault == "revoke":
                        await side.ask(op="revoke", **name)
                    elif fault == "cut":
                        side.cut()
                if k < len(cells):
                    layer, targets = cells[k]
                    span = Span(layer, layer + 1, tuple(sources[i] for i in targets), targets)
                    transfer.write([span], awaited=k >= len(cells) * 3 // 4)
            await transfer.commit(
                json.dumps([number, num_blocks]).encode(), timeout_s=0.001 if fault == "timeout" else 120
            )
            counts["committed"] += 1
        except DistServeError as e:
            counts["failed"] += 1
            counts[f"{fault}: {type(e).__name__}"] += 1
        finally:
            if transfer is not None:
                await transfer.abort("over")
            if fault in ("abort", "stale", "timeout", "forget a layer"):
                await side.ask(op="revoke", **name)
            side.memory.blocks[sources] = 0xDD  # the contract: nobody reads them any more
            side.blocks.free(sources)

    async def lane(numbers: range) -> None:
        for number in numbers:
            await one(number)
            if number % 50 == 0:
                print(json.dumps({"done": number, **counts}), flush=True)

    await asyncio.gather(*(lane(range(i, num_leases, 8)) for i in range(8)))
    side.blocks.check()
    return {"counts": counts, "own_free": side.blocks.num_free, "own_total": side.blocks.num_total}


async def stream(side: PrefillSide, num_leases: int) -> dict[str, Any]:
    """Leases of 16 blocks, eight at a time, each in 32 writes 20 ms apart."""
    rng = random.Random(0)
    outcomes: list[str] = []
    broken_at: list[float] = []

    async def one(number: int) -> None:
        sources = await side.fill(number, 16, rng)
        try:
            region = await side.lease(16)
            transfer = await side.sender.open(region, timeout_s=60)
            for layer in range(LAYOUT.num_layers):
                for i, source in enumerate(sources):
                    transfer.write([Span(layer, layer + 1, (source,), (i,))])
                    await asyncio.sleep(0.02)
                    if transfer.failure is not None and not broken_at:
                        broken_at.append(time.time())
            await transfer.commit(json.dumps([number, 16]).encode(), timeout_s=60)
            outcomes.append("committed")
        except DistServeError as e:
            broken_at.append(time.time())
            outcomes.append(f"{type(e).__name__}: {e}")
        finally:
            side.blocks.free(sources)
        print(json.dumps({"done": number, "outcome": outcomes[-1], "at": time.time()}), flush=True)

    for start in range(0, num_leases, 8):
        await asyncio.gather(*(one(n) for n in range(start, min(start + 8, num_leases))))
    return {"outcomes": outcomes, "broken_at": broken_at[:1], "epochs": [p.epoch for p in side.sender._peers.values()]}


async def victim(side: PrefillSide) -> dict[str, Any]:
    region = await side.lease(16)
    transfer = await side.sender.open(region, timeout_s=60)
    spans = [Span(0, LAYOUT.num_layers, tuple(range(1, 17)), tuple(range(16)))]
    print(json.dumps({"writing": region.lease_id}), flush=True)
    while True:
        transfer.write(spans)
        await asyncio.sleep(0.01)


async def main(url: str, what: str, *numbers: str) -> None:
    bus = await NatsBus.connect(url, name="prefill-side")
    with pool(NUM_BLOCKS, LAYOUT, seed=1) as memory:
        sender = RdmaSender(memory, bus, sender_id=f"lab-{what}", options=OPTIONS)
        side = PrefillSide(bus, memory, sender)
        before = sender._devices.nics[0].counts()
        run = {"soak": soak, "stream": stream, "victim": victim}[what]
        began = time.monotonic()
        outcome = await run(side, *(int(n) for n in numbers))  # type: ignore[operator]
        outcome |= {"seconds": time.monotonic() - began, "objects_before": before}
        outcome["objects"] = sender._devices.nics[0].counts()
        outcome["report"] = await side.ask(op="report")
        outcome["block_bytes"] = BLOCK_BYTES
        print(json.dumps(outcome), flush=True)
        await sender.stop()
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
