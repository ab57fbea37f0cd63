"""What a trace shows of a sequence's stay, whatever way it takes and wherever it ends."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from distserve.errors import DistServeError, PeerLost
from distserve.messages import SequenceKey
from distserve.telemetry import begin, entered, finish
from tests.spans import Spans, collected, id_of, seconds_of
from tests.unit.decode.decode_world import World, running
from tests.unit.decode.test_offering import FAST, PROMPT, goes_on, preempted
from tests.unit.decode.test_reservations import ask
from tests.waiting import until

KEY = SequenceKey("a")
LEASE, STAY = "lease", "process decode"


@pytest.fixture
def spans() -> Iterator[Spans]:
    with collected() as found:
        yield found


def told(spans: Spans) -> Callable[[], bool]:
    return lambda: not spans.open


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def asked(w: World, deed: Callable[[World], Awaitable[object]]) -> None:
    """As a hand-over or a gateway asks for it: with a span of its own around."""
    outer = begin("handoff", kind="client")
    try:
        with entered(outer):
            await deed(w)
    finally:
        finish(outer)


# ------------------------------------------------------------ what it looks like


async def test_a_hand_over_shows_its_wait_for_room_its_first_step_and_its_tokens(spans: Spans) -> None:
    async with running(World()) as w:
        await asked(w, lambda w: w.hand_over("a"))
        await w.ended("a")
        await until(told(spans))
    [outer] = spans.named("handoff")
    [lease, stay] = sorted(spans.below(outer), key=lambda s: s.start_time or 0)
    assert (lease.name, stay.name) == (LEASE, STAY)
    assert [span.kind.name for span in (lease, stay)] == ["CONSUMER", "CONSUMER"]
    assert attributes(stay)["distserve.outcome"] == "finished"
    assert attributes(stay)["distserve.transfer.transport"] == "shm"
    first, decode = spans.below(stay)
    assert (first.name, decode.name) == ("first step", "decode")
    assert first.start_time == pytest.approx(stay.start_time, abs=50e6)
    assert first.end_time == decode.start_time
    said = attributes(decode)
    assert (said["distserve.decode.tokens"], said["distserve.decode.preemptions"]) == (7, 0)  # prefill drew token 0
    assert said["distserve.decode.itl_p50_s"] <= said["distserve.decode.itl_p90_s"]
    assert 0 < said["distserve.decode.itl_p99_s"] <= seconds_of(decode)


async def test_a_prompt_computed_here_shows_its_queue_and_its_chunks(spans: Spans) -> None:
    async with running(World()) as w:
        w.runner.gate.clear()
        w.submit("other", [5] * 3)  # in a pass, so that the next one queues
        await until(w.runner.in_pass.is_set)
        await asked(w, _submitted(100, max_tokens=5))
        w.runner.gate.set()
        await w.ended("a", "other")
        await until(told(spans))
    [stay] = spans.named(STAY)
    names = [span.name for span in sorted(spans.below(stay), key=lambda s: s.start_time or 0)]
    assert names == ["queue", *["prefill chunk"] * 4, "first step", "decode"]
    chunks = [attributes(span) for span in spans.named("prefill chunk")]
    assert [(c["distserve.chunk.start"], c["distserve.chunk.tokens"]) for c in chunks] == [
        (0, 32), (32, 32), (64, 32), (96, 4)
    ]  # fmt: skip
    assert all(c["distserve.batch.sequences"] == 2 for c in chunks)
    assert attributes(spans.named("decode")[0])["distserve.decode.tokens"] == 5
    [queue] = spans.named("queue")
    assert queue.end_time == spans.named("prefill chunk")[0].start_time


@pytest.mark.parametrize(("bytes_per_s", "how", "back"), [(FAST, "offload", "fetched"), (0.0, "recompute", "found")])
async def test_a_preemption_shows_how_and_how_it_came_back(
    spans: Spans, bytes_per_s: float, how: str, back: str
) -> None:
    async with running(World(num_blocks=20, block_bytes=1024)) as w:
        w.worker.offering.speed.bytes_per_s = bytes_per_s
        outer = begin("handoff", kind="client")
        with entered(outer):
            others = await preempted(w)
        finish(outer)
        if how == "offload":
            w.store.let_go(14 * 1024)
            w.store.num_blocks = 1 << 20
            w.pool.drop_cached()
        await goes_on(w, others)
        await until(told(spans))
    [stay], [lost], [decode] = spans.named(STAY), spans.named("preempted"), spans.named("decode")
    said = attributes(lost)
    assert (said["distserve.preempted.how"], said["distserve.preempted.back"]) == (how, back)
    assert said["distserve.kv.cached_tokens"] > 0
    assert attributes(decode)["distserve.decode.preemptions"] == 1
    assert attributes(decode)["distserve.decode.tokens"] == 269
    assert decode.start_time < lost.start_time < lost.end_time < decode.end_time  # type: ignore[operator]
    assert lost.parent is not None
    assert lost.parent.span_id == id_of(stay)
    asked_of_store = w.store.told if how == "offload" else [("offer", None)]
    assert {getattr(span, "name", STAY) for _, span in asked_of_store} == {STAY}


async def test_what_waits_for_room_shows_how_long(spans: Spans) -> None:
    async with running(World(num_blocks=12)) as w:
        held = await w.worker.lease(ask("b", 12))
        waiting = asyncio.create_task(asked(w, lambda w: w.worker.lease(ask("a", 6))))
        await until(lambda: w.reservations.num_waiting == 1)
        await asyncio.sleep(0.1)
        w.reservations.release(held.region.lease_id, held.region.epoch, "given up")
        await waiting
    [lease] = spans.named(LEASE)
    assert seconds_of(lease) > 0.1
    assert not attributes(lease).get("error.type")


# ------------------------------------------------------------ every way out


async def test_a_pass_that_gave_no_number_counts_as_no_token(spans: Spans) -> None:
    async with running(World()) as w:
        await asked(w, lambda w: w.hand_over("nan-1"))
        await w.ended("nan-1")
        await until(told(spans))
    [stay] = spans.named(STAY)
    assert (attributes(stay)["error.type"], attributes(stay)["distserve.outcome"]) == ("internal_error", "error")
    assert [part.name for part in spans.below(stay)] == ["first step"]


@dataclass(frozen=True)
class Way:
    """What is done with sequence "a", and what its trace shows of it."""

    go: Callable[[World], Awaitable[None]]
    lease: str | None = "ok"  # or its error; None: none was asked for
    stay: str | None = None  # its outcome; None: it never came
    error: str = ""  # of the stay
    parts: tuple[str, ...] = ()  # below the stay, in order of their ends
    lost: str = ""  # the error of the lease that was lost after it had been granted


def _submitted(num_tokens: int, **more: Any) -> Callable[[World], Awaitable[None]]:
    async def go(w: World) -> None:
        w.submit("a", PROMPT[:num_tokens], **more)

    return go


def _in_pass(w: World) -> Awaitable[None]:
    return until(w.runner.in_pass.is_set, what="a pass runs")


async def _cancelled_while_waiting(w: World) -> None:
    await w.worker.lease(ask("b", 19))
    waiting = asyncio.create_task(w.worker.lease(ask("a", 5)))
    await until(lambda: w.reservations.num_waiting == 1)
    w.worker.cancel(KEY)
    await asyncio.wait({waiting})


async def _asks_no_more(w: World) -> None:
    await w.worker.lease(ask("b", 19))
    waiting = asyncio.create_task(w.worker.lease(ask("a", 5)))
    await until(lambda: w.reservations.num_waiting == 1)
    waiting.cancel()
    await asyncio.wait({waiting})


async def _no_room_in_time(w: World) -> None:
    await w.worker.lease(ask("b", 19))
    with pytest.raises(DistServeError):
        await w.worker.lease(ask("a", 5, 0.05))


async def _granted_and_released(w: World) -> None:
    grant = await w.worker.lease(ask("a", 2))
    w.reservations.release(grant.region.lease_id, grant.region.epoch, "given up")


async def _granted_and_lost(w: World) -> None:
    grant = await w.worker.lease(ask("a", 2))
    w.worker.on_lost(grant.region.lease_id, grant.region.epoch, PeerLost("its sender is gone"))


async def _granted_and_expired(w: World) -> None:
    grant = await w.worker.lease(ask("a", 2))
    w.reservations._granted[grant.region.lease_id].receiver.idle_s = lambda lease_id: 1e9  # type: ignore[method-assign]
    await until(lambda: not w.reservations.num_granted)


async def _cancelled_before_its_commit(w: World) -> None:
    grant = await w.worker.lease(ask("a", 2))
    w.worker.cancel(KEY)
    with pytest.raises(DistServeError):
        w.commit("a", grant)


async def _a_state_that_does_not_fit(w: World) -> None:
    grant = await w.worker.lease(ask("a", 2))
    with pytest.raises(DistServeError):
        w.commit("a", grant, num_computed_tokens=200, token_ids=[7] * 201, num_prompt_tokens=200)


async def _finished(w: World) -> None:
    await w.hand_over("a")
    await w.ended("a")


async def _cancelled_in_its_first_pass(w: World) -> None:
    w.runner.gate.clear()
    await w.hand_over("a")
    await _in_pass(w)
    w.worker.cancel(KEY)
    w.runner.gate.set()
    await w.idle()


async def _cancelled_later(w: World) -> None:
    await w.hand_over("a", max_tokens=250)
    await until(lambda: len(w.tokens("a")) > 3)
    w.worker.cancel(KEY)
    await w.idle()


async def _a_pass_that_fails(w: World) -> None:
    w.runner.fail = RuntimeError("boom")
    await w.hand_over("a")
    await w.ended("a")


async def _deadline(w: World) -> None:
    w.runner.gate.clear()
    await w.hand_over("a", deadline_s=0.05, max_tokens=200)
    await w.ended("a")
    w.runner.gate.set()
    await w.idle()


async def _drained(w: World) -> None:
    w.runner.gate.clear()
    await w.hand_over("a", max_tokens=200)
    await _in_pass(w)
    draining = asyncio.create_task(w.worker.drain(0.02))
    await w.ended("a")
    w.runner.gate.set()
    await draining


async def _undrawn(w: World) -> None:
    await w.hand_over("a", token_ids=[7] * 20, last_hidden=b"h" * 16)
    await w.ended("a")


async def _undrawn_and_cancelled(w: World) -> None:
    for name in "ba":
        await w.hand_over(name, token_ids=[7] * 20, last_hidden=b"h" * 16)
    w.worker.cancel(KEY)  # before the loop has looked
    await w.ended("b")


async def _preempted_and_cancelled(w: World) -> None:
    others = await preempted(w)
    w.pool.free(others)
    w.worker.cancel(KEY)
    w.store.holds = False
    while w.store.held:
        w.store.let_go()
    await w.idle()


async def _refused(w: World) -> None:
    with pytest.raises(DistServeError):
        w.submit("a", [7] * 400)


async def _computed(w: World) -> None:
    w.submit("a", PROMPT[:20])
    await w.ended("a")


async def _computed_for_one_token(w: World) -> None:
    w.submit("a", PROMPT[:20], max_tokens=1)
    await w.ended("a")


async def _cancelled_in_the_queue(w: World) -> None:
    w.runner.gate.clear()
    w.submit("b", [5] * 3)
    await _in_pass(w)
    w.submit("a", PROMPT[:20])
    w.worker.cancel(KEY)
    w.runner.gate.set()
    await w.ended("b")


async def _cancelled_while_fetching(w: World) -> None:
    w.store.num_blocks = 1 << 20
    w.store.may_come.clear()
    w.submit("a", PROMPT[:100])
    await until(lambda: w.store.num_writing == 1)
    w.worker.cancel(KEY)
    w.store.may_come.set()
    await w.idle()


async def _cancelled_between_chunks(w: World) -> None:
    w.runner.gate.clear()
    w.submit("a", PROMPT[:100])
    await _in_pass(w)
    w.worker.cancel(KEY)
    w.runner.gate.set()
    await w.idle()


STEPS = ("first step", "decode")
WAYS = {
    "cancelled while it waits for room": Way(_cancelled_while_waiting, "cancelled"),
    "who asks for room goes away": Way(_asks_no_more, "CancelledError"),
    "no room in time": Way(_no_room_in_time, "overloaded"),
    "its lease is given up": Way(_granted_and_released),
    "its lease is lost": Way(_granted_and_lost, lost="peer_lost"),
    "its lease expires": Way(_granted_and_expired, lost="lease_revoked"),
    "cancelled before its commit": Way(_cancelled_before_its_commit),
    "a state that does not fit": Way(_a_state_that_does_not_fit, stay="error", error="invalid_request"),
    "finished": Way(_finished, stay="finished", parts=STEPS),
    "cancelled in its first pass": Way(_cancelled_in_its_first_pass, stay="cancelled", parts=STEPS[:1]),
    "cancelled later": Way(_cancelled_later, stay="cancelled", parts=STEPS),
    "a pass that fails": Way(_a_pass_that_fails, stay="error", error="internal_error", parts=STEPS[:1]),
    "its deadline passes": Way(_deadline, stay="error", error="deadline_exceeded", parts=STEPS[:1]),
    "drained": Way(_drained, stay="error", error="draining", parts=STEPS[:1]),
    "its first token is drawn here": Way(_undrawn, stay="finished", parts=STEPS),
    "cancelled before that": Way(_undrawn_and_cancelled, stay="cancelled", parts=STEPS[:1]),
    "preempted, then cancelled": Way(_preempted_and_cancelled, stay="cancelled", parts=(*STEPS, "preempted")),
    "refused": Way(_refused, None, stay="error", error="invalid_request"),
    "computed here": Way(_computed, None, stay="finished", parts=("queue", "prefill chunk", *STEPS)),
    "computed here, of one token": Way(_computed_for_one_token, None, "finished", parts=("queue", "prefill chunk")),
    "cancelled in the queue": Way(_cancelled_in_the_queue, None, "cancelled", parts=("queue",)),
    "cancelled while it is fetched for": Way(_cancelled_while_fetching, None, "cancelled", parts=("queue",)),
    "cancelled in a chunk": Way(_cancelled_between_chunks, None, "cancelled", parts=("queue",)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
async def test_every_way_out_ends_every_span_once_and_leaves_no_orphan(spans: Spans, way: Way) -> None:
    async with running(World(num_blocks=20, block_bytes=1024)) as w:
        await asked(w, way.go)
        await until(told(spans), what="all have ended")

    def of_a(name: str) -> list[ReadableSpan]:
        return [span for span in spans.named(name) if attributes(span).get("distserve.request_id") == "a"]

    ends = [attributes(span).get("error.type", "ok") for span in of_a(LEASE)]
    assert ends == ([] if way.lease is None else [way.lease])
    stays = of_a(STAY)
    assert [attributes(s)["distserve.outcome"] for s in stays] == ([] if way.stay is None else [way.stay])
    for stay in stays:
        assert attributes(stay).get("error.type", "") == way.error
        assert tuple(part.name for part in spans.below(stay)) == way.parts
    assert [attributes(span)["error.type"] for span in spans.named("lease lost")] == [way.lost] * bool(way.lost)
    known = {id_of(span) for span in spans._ended}
    assert all(span.parent is None or span.parent.span_id in known for span in spans._ended)
    assert not w.worker._record._stays
