"""What a trace shows of a stay on a prefill worker: every span ends, once, whatever becomes of the sequence."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from distserve.bus import subjects
from distserve.bus.base import Delivery, RegistryEvent
from distserve.errors import DistServeError, PeerLost, SloUnattainable
from distserve.messages import SamplingParams, SequenceKey, Slo, SubmitRequest, encode
from distserve.telemetry import NO_SPAN, begin, current, entered, finish, headers_of
from distserve.worker.door import Door
from tests.spans import Spans, collected, id_of, seconds_of
from tests.unit.prefill.clockwork import SLOW, known
from tests.unit.prefill.prefill_side import World, running
from tests.waiting import until

KEY = SequenceKey("a")
RUNS_ON = SamplingParams(max_tokens=8)
ONE_TOKEN = SamplingParams(max_tokens=1)


@pytest.fixture
def spans() -> Iterator[Spans]:
    with collected() as found:
        yield found


@contextmanager
def sent() -> Iterator[None]:
    """Inside, what is submitted is part of a trace: as the door has it."""
    span = begin("send prefill", kind="client")
    with entered(span):
        yield
    finish(span)


@asynccontextmanager
async def alone(**settings: Any) -> AsyncIterator[World]:
    """At the end there is nothing left."""
    async with running(World(**settings)) as w:
        yield w
        w.runner.gate.set()
        w.store.may_answer.set()
        await w.idle()
        await until(lambda: not w.worker._recorder.untold, what="all is told")


def stay(spans: Spans) -> ReadableSpan:
    """The only one, which has ended, and nothing is open."""
    assert spans.open == []
    [found] = spans.named("process prefill")
    return found


def chunks(spans: Spans) -> list[dict[str, Any]]:
    return [dict(span.attributes or {}) for span in spans.named("prefill chunk")]


# ---------------------------------------------------------------- the usual way


async def test_a_stay_shows_its_queue_its_chunks_and_how_it_ended(spans: Spans) -> None:
    async with alone() as w:
        with sent():
            w.submit("a", num_tokens=70, slo=Slo(ttft_s=9.0, priority="vip"))  # chunks of 32, passes of 64
        await until(lambda: "a" in w.handoffs)
        w.handoffs["a"].may_commit.set()
    found = stay(spans)
    [root] = spans.named("send prefill")
    assert found.parent is not None
    assert found.parent.span_id == id_of(root)
    assert found.kind.name == "CONSUMER"
    assert found.status.status_code is StatusCode.UNSET
    assert dict(found.attributes or {}) == {
        "messaging.system": "nats",
        "messaging.operation.type": "process",
        "messaging.destination.name": subjects.worker("prefill", "p"),
        "distserve.request_id": "a",
        "distserve.worker": "p",
        "distserve.priority": "vip",
        "distserve.ttft_slo_s": 9.0,
        "distserve.outcome": "handed_over",
    }
    below = spans.below(found)
    assert [span.name for span in below] == ["queue", "prefill chunk", "prefill chunk", "prefill chunk"]
    assert [(c["distserve.chunk.start"], c["distserve.chunk.tokens"]) for c in chunks(spans)] == [
        (0, 32),
        (32, 32),
        (64, 6),
    ]
    ends = [(span.start_time, span.end_time) for span in below]
    assert ends == sorted(ends)
    assert found.start_time == below[0].start_time
    assert (found.end_time or 0) >= (below[-1].end_time or 0)
    assert below[0].end_time == below[1].start_time


async def test_a_chunk_says_what_was_beside_it_and_what_was_had(spans: Spans) -> None:
    async with alone() as w:
        w.submit("first", sampling=ONE_TOKEN, num_tokens=40, cache_salt="")
        await until(lambda: w.chunk("first", ended=True) is not None)
        w.runner.gate.clear()
        w.submit("holds", sampling=ONE_TOKEN, token_ids=[9] * 20)
        await until(w.runner.in_pass.is_set)
        with sent():
            w.submit("a", sampling=ONE_TOKEN, num_tokens=40, cache_salt="")
        w.submit("b", sampling=ONE_TOKEN, token_ids=[8] * 20)
        w.runner.gate.set()
        await until(lambda: w.chunk("b", ended=True) is not None)
    assert chunks(spans) == [
        {
            "distserve.chunk.tokens": 8,
            "distserve.chunk.start": 32,
            "distserve.batch.sequences": 2,
            "distserve.batch.tokens": 28,
            "distserve.kv.cached_tokens": 32,
        }
    ]


async def test_the_door_hands_on_who_asks(spans: Spans) -> None:
    async with alone() as w:
        door = Door(w.worker, w.outbox)
        root = begin("send prefill", kind="client")
        request = SubmitRequest(
            key=KEY,
            model="m",
            gateway="g",
            token_ids=[7] * 20,
            num_prompt_tokens=20,
            sampling=ONE_TOKEN,
        )
        for _ in range(2):  # the second is the same question again
            await door(Delivery("s", encode(request), headers=headers_of(root) or {}))
        assert current() is NO_SPAN
        finish(root)
        await until(lambda: w.chunk("a", ended=True) is not None)
    parent = stay(spans).parent
    assert parent is not None
    assert parent.span_id == root.get_span_context().span_id


async def test_what_others_do_for_it_is_part_of_its_trace(spans: Spans) -> None:
    async with alone() as w:
        w.store.num_blocks = 3
        with sent():
            w.submit("a", sampling=ONE_TOKEN, num_tokens=70, cache_salt="")
        await until(lambda: w.chunk("a", ended=True) is not None)
    found = stay(spans)
    assert [what for what, _ in w.store.told] == ["lookup", "fetch", "offer"]
    assert {span.get_span_context().span_id for _, span in w.store.told} == {id_of(found)}


async def test_what_is_not_traced_has_no_spans(spans: Spans) -> None:
    async with alone() as w:
        w.store.num_blocks = 3
        w.submit("a", sampling=ONE_TOKEN, num_tokens=70, cache_salt="")
        await until(lambda: w.chunk("a", ended=True) is not None)
        assert all(span is NO_SPAN for _, span in w.store.told)
    assert (spans.names, spans.open) == ([], [])


# ---------------------------------------------------------------- every way out, at every stage


def cancel_twice(w: World) -> None:
    w.worker.cancel(KEY)
    w.worker.cancel(KEY, PeerLost("gone"))


WAYS: dict[str, tuple[Callable[[World], object], str]] = {
    "cancelled": (lambda w: w.worker.cancel(KEY), ""),
    "gateway gone": (lambda w: w.worker.on_registry(RegistryEvent("gone", "g", None, "expired")), ""),
    "error": (lambda w: w.worker.cancel(KEY, PeerLost("gone")), "peer_lost"),
    "twice": (lambda w: cancel_twice(w), ""),
    "deadline": (lambda w: None, "deadline_exceeded"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", ["fetching", "queued", "in a pass", "between chunks", "last pass", "handing over"])
async def test_a_sequence_that_is_given_up_leaves_no_span_open(spans: Spans, stage: str, way: str) -> None:
    leave, code = WAYS[way]
    num_tokens, fields = 100, dict[str, Any](deadline_s=0.3) if way == "deadline" else {}
    async with alone() as w:
        w.runner.gate.clear()
        if stage == "fetching":
            w.store.num_blocks, fields["cache_salt"] = 3, ""
            w.store.may_answer.clear()
        if stage == "queued":
            w.submit("first", num_tokens=16 * 20, gateway="h")  # takes the whole pool
            await until(w.runner.in_pass.is_set)
        if stage == "last pass":
            num_tokens = 20
        with sent():
            w.submit("a", num_tokens=num_tokens, **fields)
        if stage in ("in a pass", "between chunks", "last pass"):
            await until(w.runner.in_pass.is_set)
        if stage == "fetching":
            await until(lambda: bool(w.store.told))
        if stage == "between chunks":
            w.runner.gate.set()
            await until(lambda: w.runner.num_passes >= 1)
        if stage == "handing over":
            w.runner.gate.set()
            await until(lambda: w.worker.status_of(KEY, 1).phase == "handoff")
        leave(w)
        if way == "deadline":
            assert (await w.error_of("a")).startswith(code)
        w.worker.cancel(SequenceKey("first"))
        w.store.may_answer.set()
        w.runner.gate.set()
        await until(lambda: w.worker.status_of(KEY, 0).phase in ("unknown", "finished"), what="it is gone")
        await until(lambda: not spans.open, what="all of its spans have ended")
    found = stay(spans)
    attributes = dict(found.attributes or {})
    assert attributes["distserve.outcome"] == ("error" if code else "cancelled")
    assert attributes.get("error.type", "") == code
    assert len(spans.named("queue")) == 1
    if stage in ("fetching", "queued"):
        assert chunks(spans) == []
        assert seconds_of(spans.named("queue")[0]) <= seconds_of(found)
    else:
        assert chunks(spans)


async def leave_on_a_failing_pass(w: World) -> None:
    w.runner.fail = RuntimeError("boom")
    w.submit("a")


async def leave_by_a_failing_handoff(w: World) -> None:
    w.submit("a")
    await until(lambda: "a" in w.handoffs)
    w.handoffs["a"].error = PeerLost("decode is gone")
    w.handoffs["a"].may_commit.set()


async def leave_without_numbers(w: World) -> None:
    w.submit("nan-a")


async def leave_at_the_first_token(w: World) -> None:
    w.submit("a", sampling=ONE_TOKEN)


async def leave_when_it_drains(w: World) -> None:
    w.submit("a")
    await until(lambda: w.worker.status_of(KEY, 1).phase == "handoff")
    await w.worker.drain(0.01)


@pytest.mark.parametrize(
    ("leave", "outcome", "code"),
    [
        (leave_on_a_failing_pass, "error", DistServeError.code),
        (leave_by_a_failing_handoff, "error", "peer_lost"),
        (leave_without_numbers, "error", DistServeError.code),
        (leave_at_the_first_token, "finished", ""),
        (leave_when_it_drains, "error", "draining"),
    ],
)
async def test_an_end_of_its_own_is_told_with_its_error(spans: Spans, leave: Any, outcome: str, code: str) -> None:
    async with alone() as w:
        with sent():
            await leave(w)
        await until(lambda: not spans.open, what="all of its spans have ended")
        w.runner.fail = None
    found = stay(spans)
    attributes = dict(found.attributes or {})
    assert (attributes["distserve.outcome"], attributes.get("error.type", "")) == (outcome, code)
    assert found.status.status_code is (StatusCode.ERROR if code else StatusCode.UNSET)
    [chunk] = spans.named("prefill chunk")
    assert (chunk.status.status_code is StatusCode.ERROR) == (leave is leave_on_a_failing_pass)


async def test_one_that_is_refused_has_no_stay(spans: Spans) -> None:
    async with alone(model=known(SLOW)) as w:
        with sent(), pytest.raises(SloUnattainable):
            w.submit("a", num_tokens=200, slo=Slo(ttft_s=0.01))
    assert (spans.names, spans.open) == (["send prefill"], [])
