"""How dealings with the store end when somebody else does not answer: within their time."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from distserve.messages import OfferRequest
from distserve.worker.store import giving, pool_source
from tests.unit.worker.store.peers import Peer, chain, net
from tests.waiting import until


class Unending:
    """A sender none of whose transfers ends until `may_end`, not even when it is given up."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.num_opened = 0
        self.reasons: list[str] = []

    async def open(self, *_: object, **__: object) -> "Unending":
        self.num_opened += 1
        return self

    def write(self, spans: object, *, awaited: bool = False) -> None: ...

    async def commit(self, state: bytes, *, timeout_s: float) -> int:
        await self.may_end.wait()
        return 0

    async def abort(self, reason: str) -> None:
        self.reasons.append(reason)
        await self.may_end.wait()


@asynccontextmanager
async def unending(peer: Peer) -> AsyncIterator[Unending]:
    """In place of its senders."""
    senders = dict(peer.senders)
    made = Unending()
    peer.senders.update(dict.fromkeys(peer.senders, made))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.may_end.set()
        peer.senders.update(senders)


async def test_offers_and_fetches_that_drain_share_one_deadline() -> None:
    async with net() as n:
        worker, other, node = await n.peer("worker"), await n.peer("other"), await n.peer("node", "kvstore")
        offered, sought = chain(20), chain(20, salt="sought")
        never = asyncio.Event()
        node.on_message = lambda m: never.wait() if isinstance(m, OfferRequest) else None
        async with unending(worker) as sender:
            worker.store.client.offer(offered, 0, worker.holds(offered))
            worker.holds(sought)
            found = await other.store.client.lookup(sought, 0, holder="worker")
            fetch = asyncio.create_task(other.store.client.fetch(found, other.pool.allocate(20), timeout_s=30))
            await until(lambda: sender.num_opened == 1 and worker.store.client.num_offers == 1)
            began = time.monotonic()
            await worker.store.drain(0.5)
            assert 0.45 < time.monotonic() - began < 0.9
            fetch.cancel()
            await asyncio.wait({fetch})
        never.set()


async def test_an_offer_that_never_ends_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving, "STOP_S", 0.2)
    async with net() as n:
        worker = await n.peer("worker")
        await n.peer("node", "kvstore")
        c, d = chain(8), chain(8, salt="d")
        async with unending(worker) as sender:
            worker.store.client.offer(c, 0, worker.holds(c))
            sink = worker.store.client.streaming_offer(d, 0, worker.holds(d))
            await until(lambda: sender.num_opened == 2)
            stop = asyncio.create_task(worker.store.client.stop())
            await asyncio.wait({stop}, timeout=3)
            assert stop.done()
            assert len(sender.reasons) == 2, "both were given up"
            sink.finished()  # too late, and no harm
        await until(lambda: not worker.store.client.num_offers, what="their end")
        assert worker.pool.num_used == 0


async def test_a_fetch_by_another_that_never_ends_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_source, "STOP_S", 0.2)
    async with net() as n:
        worker, other = await n.peer("worker"), await n.peer("other")
        c = chain(8)
        worker.holds(c)
        async with unending(worker) as sender:
            found = await other.store.client.lookup(c, 0, holder="worker")
            ours = other.pool.allocate(8)
            fetch = asyncio.create_task(other.store.client.fetch(found, ours, timeout_s=30))
            await until(lambda: sender.num_opened == 1)
            stop = asyncio.create_task(worker.store.source.stop())
            await asyncio.wait({stop}, timeout=3)
            assert stop.done()
            assert len(sender.reasons) == 1, "it was given up"
            assert "1 fetches by others have not ended" in caplog.text
            assert worker.pool.num_used == 8, "what may still be read has no other owner"
            fetch.cancel()
            await asyncio.wait({fetch}, timeout=5)
            other.pool.free(ours)
        await until(lambda: not len(worker.store.source), what="its end")
        assert worker.pool.num_used == 0
