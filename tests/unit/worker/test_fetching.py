"""What others hold of a prompt, brought before its turn: by real pools and transports, and, where the order of things
matters, by a store that does as it is told."""

import asyncio
import time
from collections.abc import Callable

import pytest

from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.kv.hashing import Chain
from distserve.kv.placement import owners
from distserve.messages import FetchRequest, Message, PrefixRequest, SamplingParams, SequenceKey
from distserve.worker.fetching import Fetching
from distserve.worker.prefixes import Prefixes
from distserve.worker.store import pauses
from distserve.worker.store.client import StoreClient
from tests.contracts.transport.pools import SMALL
from tests.unit.prefill.store_side import ScriptedStore
from tests.unit.worker.store.peers import Peer, chain, config, net
from tests.waiting import until


def fetching(
    pool: BlockPool, store: StoreClient, *, timeout_s: float = 5.0, spoken_for: Callable[[], int] = lambda: 0
) -> Fetching:
    prefixes = Prefixes(pool, SMALL, keep=True)
    return Fetching(pool, prefixes, store, min_blocks=1, timeout_s=timeout_s, num_spoken_for=spoken_for)


def of(worker: Peer, **more: float) -> Fetching:
    return fetching(worker.pool, worker.store.client, **more)  # type: ignore[arg-type]


def prompt(c: Chain, name: str = "r") -> Sequence:
    """One of which all blocks of the chain but the last are wanted."""
    num = len(c) * SMALL.block_size
    sequence = Sequence(SequenceKey(name), [i % 50_000 for i in range(num)], num, SamplingParams(max_tokens=4))
    sequence.chain = c
    return sequence


def hang(message: Message) -> object:
    """A node that answers lookups, and from which nothing comes."""
    return asyncio.Event().wait() if isinstance(message, FetchRequest) else None


async def took(bringing: Fetching, sequence: Sequence) -> float:
    began = time.monotonic()
    await bringing.bring(sequence, "")
    return time.monotonic() - began


# ---------------------------------------------------------------- sources that fail


async def test_what_has_come_when_the_time_is_over_is_kept() -> None:
    async with net() as n:
        c = chain(130)
        names = next(
            names
            for names in ([f"n{i}-0", f"n{i}-1"] for i in range(100))
            if [owners(c.hashes[d], names)[0] for d in (0, 64)] == names
        )
        first, second = [await n.peer(name, "kvstore") for name in names]
        worker = await n.peer("worker", setup=config(replicas=1))
        first.holds(c, 0, 64)
        second.holds(c, 64, 128)
        second.on_message = hang
        assert await took(of(worker, timeout_s=0.6), prompt(c)) < 0.6
        assert len(worker.pool.find(c.hashes)) == 64
        assert worker.store.counts.num_fetched_blocks == 64
        assert worker.store.counts.num_failed_fetches == {"deadline_exceeded": 1}
        assert worker.at_rest


async def test_a_source_from_which_nothing_comes_costs_one_prompt_its_time_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pauses, "FIRST_S", 0.2)
    async with net() as n:
        worker = await n.peer("worker", setup=config(fetch_timeout_s=0.4))
        node = await n.peer("node", "kvstore")
        chains = [chain(20, salt=str(i)) for i in range(8)]
        for c in chains:
            node.holds(c)
        node.on_message = hang
        bringing = of(worker, timeout_s=0.4)
        assert await took(bringing, prompt(chains[0])) > 0.3
        for c in chains[1:4]:
            assert await took(bringing, prompt(c)) < 0.3
        assert len(node.heard_of(FetchRequest)) == 1
        await asyncio.sleep(0.2)  # the pause; to look whether it is over would be the try
        await asyncio.gather(*(bringing.bring(prompt(c), "") for c in chains[4:7]))
        assert len(node.heard_of(FetchRequest)) == 2
        node.on_message = None
        deadline = time.monotonic() + 5
        while not worker.pool.find(chains[7].hashes):
            assert time.monotonic() < deadline
            await bringing.bring(prompt(chains[7]), "")
            await asyncio.sleep(0.02)
        await bringing.bring(prompt(chains[0]), "")
        assert worker.pool.find(chains[0].hashes), "it is as good as any again"
        await until(lambda: node.at_rest)


async def test_a_source_whose_blocks_are_gone_is_asked_again_at_once() -> None:
    async with net() as n:
        worker, node = await n.peer("worker"), await n.peer("node", "kvstore")
        c = chain(20)
        node.holds(c)

        def lose(message: Message) -> None:
            if isinstance(message, FetchRequest):
                node.pins.close()
                node.pool.drop_cached()

        node.on_message = lose
        bringing = of(worker)
        await bringing.bring(prompt(c), "")
        assert worker.store.counts.num_failed_fetches == {"blocks_missing": 1}
        node.on_message = None
        node.holds(c)
        await bringing.bring(prompt(c), "")
        assert len(worker.pool.find(c.hashes)) == 19


# ---------------------------------------------------------------- room


async def test_without_room_nobody_is_asked() -> None:
    async with net() as n:
        worker, node = await n.peer("worker"), await n.peer("node", "kvstore")
        c = chain(20)
        node.holds(c)
        room = 0
        bringing = fetching(worker.pool, worker.store.client, spoken_for=lambda: worker.pool.num_available - room)
        await bringing.bring(prompt(c), "")
        assert not node.heard_of(PrefixRequest)
        room = 5
        await bringing.bring(prompt(c), "")
        assert len(worker.pool.find(c.hashes)) == 5


# ---------------------------------------------------------------- several that lack the same


class Together:
    """Prompts that lack the same six blocks, and a store that brings them when `store.may_come`."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self.pool = BlockPool(41)
        self.store = ScriptedStore()
        self.store.num_blocks = 6
        self.store.may_come.clear()
        self.fetching = fetching(self.pool, self.store, timeout_s=timeout_s)  # type: ignore[arg-type]
        self.chain = chain(7)

    def come(self, *names: str) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.fetching.bring(prompt(self.chain, name), "")) for name in names]

    @property
    def num_here(self) -> int:
        return len(self.pool.find(self.chain.hashes))


async def test_when_the_client_of_the_one_that_fetches_leaves_the_next_takes_over() -> None:
    t = Together()
    a, b, c = t.come("a", "b", "c")
    await until(lambda: len(t.store.fetched_to) == 1)
    a.cancel()
    await until(lambda: len(t.store.fetched_to) == 2, what="another one's fetch")
    assert a.cancelled()
    assert not b.done()
    assert not c.done()
    b.cancel()
    await until(lambda: len(t.store.fetched_to) == 3)
    t.store.may_come.set()
    await c
    assert (t.num_here, t.pool.num_used) == (6, 0)


async def test_what_one_could_not_fetch_the_others_do_not_try() -> None:
    t = Together()
    waiting = t.come("a", "b", "c")
    await until(lambda: len(t.store.fetched_to) == 1)
    t.store.brings = 0
    t.store.may_come.set()
    await asyncio.gather(*waiting)
    assert (len(t.store.fetched_to), t.num_here, t.pool.num_used) == (1, 0, 0)


async def test_one_whose_time_is_half_over_begins_no_fetch() -> None:
    """Its source would have too little time, and be left out for it."""
    t = Together(timeout_s=0.4)
    a, b = t.come("a", "b")
    await until(lambda: len(t.store.fetched_to) == 1)
    await asyncio.sleep(0.25)
    a.cancel()
    await b
    assert (len(t.store.fetched_to), t.pool.num_used) == (1, 0)
