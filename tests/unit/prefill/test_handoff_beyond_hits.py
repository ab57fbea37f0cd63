"""Hand-overs to decode workers that hold a prompt's beginning, over real transports: only the rest is sent."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import numpy as np
import pytest

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.errors import LeaseRevoked
from distserve.kv.lease import LeaseTable
from distserve.messages import LeaseGrant, LeaseRelease, LeaseRequest, decode, encode
from distserve.transport.base import Commit, Lease, Span
from distserve.transport.factory import make_receiver, make_sender
from distserve.worker.in_use import InUse
from distserve_prefill.fallbacks import Fallbacks
from distserve_prefill.handoff import Handoff
from tests.contracts.transport.pools import SMALL, pool
from tests.unit.prefill.decode_side import FAST, SOURCES, NotingSender, ask, state
from tests.waiting import until

CACHED = Span(0, SMALL.num_layers, SOURCES[:2], (0, 1))  # had from prefill's pool
COMPUTED = [Span(i, i + 1, SOURCES[2:], (2,)) for i in range(SMALL.num_layers)]
BLOCK_BYTES = 8192


class Holder:
    """A decode worker that grants what is asked, but for the num_hits blocks that it has; those stay as they are."""

    blocks = (4, 2, 7)  # for the prompt's, as it will have them

    def __init__(self, worker_id: str, num_hits: int, kind: str, hub: MemoryHub, stack: AsyncExitStack) -> None:
        self.worker_id = worker_id
        self.num_hits = num_hits
        self.memory = stack.enter_context(pool(8, SMALL))
        self.receiver = make_receiver(kind, self.memory, options=FAST)
        self.refuses = False  # at the commit
        self.leases: list[Lease] = []
        self.asked: list[LeaseRequest] = []
        self.commits: list[Commit] = []
        self._table = LeaseTable()
        self._bus = MemoryBus(hub)
        self._stack = stack

    async def start(self) -> None:
        await self.receiver.start(self._on_commit, lambda lease_id, epoch, error: None)
        self._stack.push_async_callback(self.receiver.stop)
        await self._bus.serve(subjects.worker("decode", self.worker_id), self._answer)

    async def _answer(self, delivery: Delivery) -> bytes:
        message = decode(delivery.data)
        if isinstance(message, LeaseRelease):
            await self.receiver.revoke(message.lease_id, message.epoch)
            return b""
        assert isinstance(message, LeaseRequest)
        self.asked.append(message)
        lease = self._table.grant("p", self.blocks[self.num_hits :], 60, 0.0)
        self.leases.append(lease)
        return encode(LeaseGrant(region=self.receiver.grant(lease), ttl_s=60, num_hit_blocks=self.num_hits))

    def _on_commit(self, commit: Commit) -> None:
        if self.refuses:
            raise LeaseRevoked("not any more")
        self.commits.append(commit)

    def has(self, source: np.ndarray) -> bool:  # type: ignore[type-arg]
        """All that it lacked has come, to its place, and nothing else was touched."""
        lacking = slice(self.num_hits, None)
        came = np.array_equal(self.memory.blocks[list(self.blocks[lacking])], source[list(SOURCES[lacking])])
        others = [b for b in range(8) if b not in self.blocks[lacking]]
        return came and not self.memory.blocks[others].any()


class World:
    def __init__(self, kind: str, stack: AsyncExitStack) -> None:
        self.kind = kind
        self.stack = stack
        self.hub = MemoryHub()
        self.source = stack.enter_context(pool(16, SMALL, seed=1))
        self.sender = NotingSender(make_sender(kind, self.source, sender_id="p", options=FAST))
        stack.push_async_callback(self.sender.stop)

    async def handoff(self, *holders: Holder) -> Handoff:
        for holder in holders:
            await holder.start()
        ids = [h.worker_id for h in holders]
        handoff = Handoff(
            MemoryBus(self.hub),
            ask(self.kind),
            lambda tried: next((w for w in ids if w not in tried), None),
            lambda kind: self.sender,
            Fallbacks([self.kind]),
            InUse(),
            connect_timeout_s=2,
            commit_timeout_s=5,
            give_up_s=5,
        )
        handoff.start()
        return handoff

    def holder(self, worker_id: str, num_hits: int) -> Holder:
        return Holder(worker_id, num_hits, self.kind, self.hub, self.stack)


@pytest.fixture(params=["shm", "tcp"])
async def w(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(request.param, stack)


def cells(spans: list[Span]) -> Counter[tuple[int, int]]:
    """(layer, target) of all that was written."""
    return Counter((layer, t) for s in spans for layer in range(s.layer_start, s.layer_stop) for t in s.targets)


@pytest.mark.parametrize("num_hits", [0, 1, 2])
@pytest.mark.parametrize("computed", ["before the lease", "after"])
async def test_each_layer_of_each_block_that_is_lacking_is_written_once(w: World, num_hits: int, computed: str) -> None:
    a = w.holder("A", num_hits)
    handoff = await w.handoff(a)
    handoff.layers_ready(CACHED)
    if computed == "after":
        await until(lambda: bool(w.sender.transfers), 5, "the lease is granted")
        await until(lambda: bool(w.sender.transfers[0].written) or num_hits == 2, 5, "what is cached goes out at once")
    for span in COMPUTED:
        await asyncio.to_thread(handoff.layers_ready, span, awaited=span.layer_stop == SMALL.num_layers)
    shipped = await handoff.commit(state)
    assert shipped.num_bytes == (3 - num_hits) * BLOCK_BYTES
    lacking = range(3 - num_hits)
    assert cells(w.sender.transfers[0].written) == Counter(
        (layer, t) for layer in range(SMALL.num_layers) for t in lacking
    )
    assert a.has(w.source.blocks)
    assert len(a.commits) == 1


@pytest.mark.parametrize(("first", "second"), [(2, 0), (0, 2), (1, 2)])
async def test_another_decode_worker_is_sent_what_it_lacks_itself(w: World, first: int, second: int) -> None:
    a, b = w.holder("A", first), w.holder("B", second)
    a.refuses = True
    handoff = await w.handoff(a, b)
    handoff.layers_ready(CACHED)
    for span in COMPUTED:
        handoff.layers_ready(span, awaited=span.layer_stop == SMALL.num_layers)
    shipped = await handoff.commit(state)
    assert (shipped.decode_worker, shipped.num_bytes) == ("B", (3 - second) * BLOCK_BYTES)
    assert b.has(w.source.blocks)
    assert len(b.commits) == 1
    assert not a.commits
