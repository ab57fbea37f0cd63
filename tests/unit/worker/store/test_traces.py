"""What a trace shows of lookups, fetches and offers: at who asks and at who answers, however they end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from distserve.bus import subjects
from distserve.errors import DistServeError
from distserve.kv.layout import fingerprint
from distserve.messages import ChainRun, FetchRequest, Message, PrefixRequest
from distserve.telemetry import NO_SPAN, Span, begin, entered, finish
from tests.contracts.transport.pools import SMALL
from tests.spans import Spans, collected, id_of
from tests.unit.worker.store.peers import chain, config, net
from tests.unit.worker.store.test_fetching import Stopper, settled
from tests.unit.worker.store.test_with_store_nodes import store_node
from tests.waiting import until

BLOCK_BYTES = 8192


@pytest.fixture
def spans() -> Iterator[Spans]:
    """In the end every span has ended, and every parent is there."""
    with collected() as found:
        yield found
        assert not found.open
        known = {id_of(span) for span in found._ended}
        orphans = [span.name for span in found._ended if span.parent is not None and span.parent.span_id not in known]
        assert not orphans


@pytest.fixture
def stay(spans: Spans) -> Iterator[Span]:
    span = begin("stay")
    yield span
    finish(span)


def said(span: ReadableSpan) -> dict[str, Any]:
    """Its attributes, ours without "distserve."."""
    return {name.removeprefix("distserve."): value for name, value in (span.attributes or {}).items()}


def under(spans: Spans, name: str, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the only span of this name says, and the only one below it, which is of another service."""
    [ours] = spans.named(name)
    [theirs] = spans.below(ours)
    assert (ours.kind.name, theirs.kind.name, theirs.name) == ("CLIENT", "CONSUMER", kind)
    return said(ours), said(theirs)


async def test_both_sides_tell_what_was_offered_found_and_fetched(spans: Spans, stay: Span, tmp_path: Path) -> None:
    async with net() as n:
        giver, taker = await n.peer("giver", seed=1), await n.peer("taker")
        c = chain(40)
        async with store_node(n, "node", tmp_path):
            await until(giver.store.client.may_find)
            giver.store.client.offer(c, 0, giver.holds(c), span=stay)
            await until(lambda: giver.store.counts.num_offered_blocks == 40)
            await until(taker.store.client.may_find)
            found = await taker.store.client.lookup(c, 0, span=stay)
            ours = taker.pool.allocate(40)
            assert await taker.store.client.fetch(found, ours, timeout_s=20, span=stay) == 40
            await until(lambda: spans.open == ["stay"])
    asked, taken = under(spans, "kvstore offer", "process offer")
    assert (asked["kv.node"], asked["kv.sought_blocks"], asked["kv.blocks"]) == ("node", 40, 40)
    assert (asked["kv.bytes"], asked["transfer.traffic_class"]) == (40 * BLOCK_BYTES, "background")
    assert taken["kv.blocks"] == 40
    asked, answered = under(spans, "kvstore lookup", "process lookup")
    for each in (asked, answered):
        assert (each["kv.blocks"], each["kv.tier"], each["kv.dram_blocks"]) == (40, "dram", 40)
    assert (asked["messaging.destination.name"], asked["kv.node"]) == (subjects.worker("kvstore", "node"), "node")
    asked, served = under(spans, "kvstore fetch", "process fetch")
    for each in (asked, served):
        assert (each["kv.blocks"], each["kv.tier"], each["kv.bytes"]) == (40, "dram", 40 * BLOCK_BYTES)
    assert asked["kv.cached_tokens"] == 40 * SMALL.block_size
    assert asked["transfer.transport"] == served["transfer.transport"] == "shm"
    assert served["kv.read_wait_s"] == 0, "it was in memory"
    assert served["transfer.wire_s"] > 0


async def test_a_node_tells_how_long_a_fetch_waited_for_its_disk(spans: Spans, stay: Span, tmp_path: Path) -> None:
    async with net() as n:
        giver, taker = await n.peer("giver", seed=1), await n.peer("taker")
        c = chain(40)
        async with store_node(n, "node", tmp_path):
            await until(giver.store.client.may_find)
            giver.store.client.offer(c, 0, giver.holds(c))
            await until(lambda: giver.store.counts.num_offered_blocks == 40)
        async with store_node(n, "again", tmp_path):
            await until(taker.store.client.may_find)
            found = await taker.store.client.lookup(c, 0, span=stay)
            assert await taker.store.client.fetch(found, taker.pool.allocate(40), timeout_s=20, span=stay) == 40
    _, served = under(spans, "kvstore fetch", "process fetch")
    assert (served["kv.tier"], served["kv.disk_blocks"]) == ("disk", 40)
    assert served["kv.read_wait_s"] > 0
    assert not spans.named("kvstore offer"), "that was not traced"


async def test_each_owner_that_is_asked_has_a_span_of_its_own(spans: Spans, stay: Span) -> None:
    async with net() as n:
        c = chain(640)
        nodes = [await n.peer(f"node-{i}", "kvstore", num_blocks=700) for i in range(3)]
        worker = await n.peer("worker", num_blocks=700, setup=config(replicas=1))
        found = await worker.store.client.lookup(c, 0, span=stay)
        worker.store.client.release(found)
        await settled(worker, *nodes)
    asked = spans.named("kvstore lookup")
    assert sorted(said(span)["kv.node"] for span in asked) == ["node-0", "node-1", "node-2"]
    assert sum(said(span)["kv.sought_blocks"] for span in asked) == 640
    for span in asked:
        [answered] = spans.below(span)
        assert said(answered)["worker"] == said(span)["kv.node"]
        assert said(answered)["kv.blocks"] == 0


async def test_a_decode_workers_pool_is_asked_and_answers_the_same_way(spans: Spans, stay: Span) -> None:
    async with net() as n:
        holder, worker = await n.peer("holder", seed=1), await n.peer("worker")
        c = chain(20)
        holder.holds(c)
        found = await worker.store.client.lookup(c, 0, holder="holder", span=stay)
        ours = worker.pool.allocate(20)
        assert await worker.store.client.fetch(found, ours, timeout_s=10, span=stay) == 20
        worker.pool.free(ours)
        await settled(worker, holder)
    _, answered = under(spans, "kvstore lookup", "process lookup")
    asked, served = under(spans, "kvstore fetch", "process fetch")
    assert answered["kv.pool_blocks"] == asked["kv.pool_blocks"] == served["kv.pool_blocks"] == 20
    assert served["kv.bytes"] == 20 * BLOCK_BYTES


async def test_a_question_that_a_pool_cannot_read_ends_its_span_with_the_reason(spans: Spans, stay: Span) -> None:
    async with net() as n:
        holder = await n.peer("holder", seed=1)
        runs = [ChainRun(start=0, hashes=b"odd", parent=b"")]
        question = PrefixRequest(asker="worker", layout=fingerprint(SMALL), runs=runs, pin_s=0.0)
        with entered(stay), pytest.raises(DistServeError) as raised:
            await holder.store.answer(question)
    [answered] = spans.named("process lookup")
    assert said(answered)["error.type"] == raised.value.code


async def test_a_silent_node_ends_its_span_when_its_answer_is_taken_no_more(spans: Spans, stay: Span) -> None:
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker", setup=config(lookup_timeout_s=0.1))
        frozen = asyncio.Event()

        async def hold(message: Message) -> None:
            if isinstance(message, PrefixRequest):
                await frozen.wait()

        node.on_message = hold
        assert not await worker.store.client.lookup(chain(8), 0, span=stay)
        assert spans.open == ["stay", "kvstore lookup"], "it may still come"
        await until(lambda: spans.open == ["stay"], timeout_s=5)
        frozen.set()
        await until(lambda: len(spans.named("process lookup")) == 1)
    [asked] = spans.named("kvstore lookup")
    assert said(asked)["error.type"] == "bus_timeout"


@pytest.mark.parametrize("how", ["the source leaves", "the asker gives up", "the source has lost them"])
async def test_a_fetch_that_fails_ends_both_spans_with_the_reason(spans: Spans, stay: Span, how: str) -> None:
    async with net() as n:
        node = await n.peer("node", "kvstore", num_blocks=140)
        worker = await n.peer("worker")
        c = chain(64)
        node.holds(c)
        found = await worker.store.client.lookup(c, 0, span=stay)
        if how == "the source has lost them":
            node.pins.close()
            node.pool.free(node.pool.allocate(139))
        stopper = Stopper(node)
        ours = worker.pool.allocate(64)
        fetch = asyncio.create_task(worker.store.client.fetch(found, ours, timeout_s=30, span=stay))
        await stopper.reached.wait()
        if how == "the source leaves":
            await node.leave()
        elif how == "the asker gives up":
            fetch.cancel()
        else:
            stopper.go_on.set()
        await asyncio.wait({fetch})
        worker.pool.free(ours)
        stopper.go_on.set()
        await until(lambda: len(spans.named("process fetch")) == 1)
        await settled(worker, node)
    [asked], [served] = spans.named("kvstore fetch"), spans.named("process fetch")
    expected = {
        "the source leaves": ("worker_lost", "lease_revoked"),
        "the asker gives up": ("CancelledError", "lease_revoked"),
        "the source has lost them": ("blocks_missing", "blocks_missing"),
    }
    assert (said(asked)["error.type"], said(served)["error.type"]) == expected[how]
    assert said(asked)["kv.blocks"] == 0


@pytest.mark.parametrize("how", ["refused", "given up", "stopped"])
async def test_an_offer_that_comes_to_nothing_ends_its_span(spans: Spans, stay: Span, how: str) -> None:
    async with net() as n:
        layout = msgspec.structs.replace(SMALL, rope="other") if how == "refused" else SMALL
        node = await n.peer("node", "kvstore", layout=layout, advertised=SMALL)
        worker = await n.peer("worker")
        c = chain(8)
        ids = worker.holds(c)
        if how == "refused":
            worker.store.client.offer(c, 0, ids, span=stay)
        else:
            sink = worker.store.client.streaming_offer(c, 0, ids, span=stay)
            await until(lambda: node.keeper.num_open == 1)
            if how == "given up":
                sink.abandoned()
            else:
                await worker.store.client.stop()
        await until(lambda: len(spans.named("kvstore offer")) == 1)
    [offer] = spans.named("kvstore offer")
    assert said(offer)["error.type"] == {
        "refused": "layout_mismatch", "given up": "cancelled", "stopped": "CancelledError"
    }[how]  # fmt: skip
    assert (said(offer)["kv.node"], said(offer)["kv.blocks"]) == ("node", 0)


async def test_what_is_not_traced_shows_nothing(spans: Spans) -> None:
    async with net() as n:
        node, worker = await n.peer("node", "kvstore"), await n.peer("worker")
        c = chain(8)
        node.holds(c)
        found = await worker.store.client.lookup(c, 0, span=NO_SPAN)
        ours = worker.pool.allocate(8)
        assert await worker.store.client.fetch(found, ours, timeout_s=10) == 8
        worker.pool.free(ours)
        assert node.heard_of(FetchRequest)
        await settled(worker, node)
    assert not spans.names
