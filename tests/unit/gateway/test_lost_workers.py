"""Silence, lost messages and dead workers: no stream hangs, and none is given up that could go on."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus
from distserve.errors import DistServeError, Overloaded, WorkerLost
from distserve.messages import (
    CancelRequest,
    SamplingParams,
    SequenceKey,
    SequenceStatus,
    StatusReply,
    StatusRequest,
    SubmitReply,
    SubmitRequest,
    TokenChunk,
    WorkerInfo,
    decode,
    encode,
)
from distserve_gateway import streams as streams_module
from distserve_gateway.live import Inbox, LiveSequence
from distserve_gateway.silence import SilenceWatch
from tests.unit.gateway.scripted import LAYOUT, MODEL, TOKENIZER, Cluster, ScriptedWorker, memory_cluster, says, serving
from tests.waiting import until

TEXT = "The capital of France is Paris, and the rest of this answer is here too."
BODY = {"prompt": "a", "max_tokens": 99, "stream": True}
NUM = len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with serving(says(TEXT), silence_s=0.1) as cluster:
        yield cluster


async def ask(cluster: Cluster, **fields: Any) -> list[Any]:
    """The events of a streamed completion, `[DONE]` included."""
    async with cluster.client() as client:
        response = await client.post("/v1/completions", json=BODY | fields)
        assert response.status_code == 200, response.text
        parts = response.text.split("\n\n")[:-1]
        return [p[6:] if p.endswith("[DONE]") else json.loads(p[6:]) for p in parts]


def text_of(events: list[Any]) -> str:
    return "".join(e["choices"][0]["text"] for e in events if e != "[DONE]" and "choices" in e)


def lose_batches(worker: ScriptedWorker, *serials: int) -> None:
    """The worker's messages with these numbers (from 1) to gateways never arrive."""
    publish, sent = worker.bus.publish, iter(range(1, 10_000))

    async def lossy(subject: str, data: bytes, **options: Any) -> None:
        if subject.startswith(subjects.stream("")) and next(sent) in serials:
            return
        await publish(subject, data, **options)

    worker.bus.publish = lossy  # type: ignore[method-assign]


async def test_a_lost_message_in_the_middle_is_asked_for_again(cluster: Cluster) -> None:
    lose_batches(cluster.workers["d0"], 3, 4, 7)
    events = await ask(cluster)
    assert text_of(events) == TEXT
    assert events[-1] == "[DONE]"


async def test_a_lost_message_is_asked_for_while_tokens_behind_it_keep_coming() -> None:
    """Each token behind the gap comes sooner than a silence would be noticed, and the end is far away."""
    ids = TOKENIZER.encode(TEXT, add_special_tokens=False) * 100

    async with serving(lambda request: ids, silence_s=1.0) as cluster:
        worker = cluster.workers["d0"]
        lose_batches(worker, 3)
        publish = worker.bus.publish

        async def paced(subject: str, data: bytes, **options: Any) -> None:
            await publish(subject, data, **options)
            await asyncio.sleep(0.01)

        worker.bus.publish = paced  # type: ignore[method-assign]
        task = asyncio.create_task(ask(cluster, max_tokens=250))
        await until(lambda: any(s.waiting for s in cluster.gateway.streams), what="tokens behind the gap")
        (sequence,) = cluster.gateway.streams
        await until(lambda: not sequence.waiting, timeout_s=0.9, what="what was lost")
        assert not sequence.done
        assert sequence.token_ids == ids[: len(sequence.token_ids)]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_a_lost_batch_may_have_held_is_asked_for_however_often_others_are_heard(cluster: Cluster) -> None:
    worker = cluster.workers["d0"]
    worker.gate_at = 3
    task = asyncio.create_task(ask(cluster))
    await until(lambda: any(len(s.token_ids) == 3 for s in cluster.gateway.streams), what="three tokens")
    (sequence,) = cluster.gateway.streams
    streams = cluster.gateway.streams
    soon = sequence.ask_at
    streams.ask_soon("d0")
    assert (asked := sequence.ask_at) < soon
    streams.receive(TokenChunk(sequence.key, 1, sequence.token_ids[1:]), "d0")  # a double
    streams.receive(TokenChunk(sequence.key, 50, [5]), "d0")  # behind a gap
    assert sequence.ask_at == asked
    sequence.waiting.clear()
    worker.gate.set()
    assert text_of(await task) == TEXT


async def test_a_lost_last_message_is_asked_for_again(cluster: Cluster) -> None:
    lose_batches(cluster.workers["d0"], NUM)
    assert text_of(await ask(cluster)) == TEXT


async def test_everything_lost_is_asked_for_again_even_from_a_decode_worker_nobody_named(cluster: Cluster) -> None:
    other = await cluster.add("decode", "d1", says(TEXT))
    await cluster.see("d1")
    cluster.workers["p0"].redirect = "d1"
    lose_batches(other, *range(1, NUM + 1))
    lose_batches(cluster.workers["p0"], 1)
    assert text_of(await ask(cluster)) == TEXT
    assert cluster.workers["d0"].submitted == []


async def test_a_hand_over_to_another_decode_worker_is_followed(cluster: Cluster) -> None:
    await cluster.add("decode", "d1", says(TEXT))
    cluster.workers["p0"].redirect = "d1"
    assert text_of(await ask(cluster)) == TEXT


async def test_a_long_silence_of_a_worker_that_answers_is_no_reason_to_give_up(cluster: Cluster) -> None:
    worker = cluster.workers["d0"]
    worker.gate_at = 3
    task = asyncio.create_task(ask(cluster))
    asked = 0
    status_of = worker.status_of

    def counting(key: SequenceKey, position: int) -> SequenceStatus:
        nonlocal asked
        asked += 1
        return status_of(key, position)

    worker.status_of = counting  # type: ignore[method-assign]
    await until(lambda: asked >= 5, what="five questions")
    worker.gate.set()
    assert text_of(await task) == TEXT


async def test_a_late_answer_of_prefill_says_nothing_of_decode(cluster: Cluster) -> None:
    """Prefill was asked before decode's first tokens came; its `unknown` arrives after them."""
    worker = cluster.workers["d0"]
    worker.gate_at = 3
    task = asyncio.create_task(ask(cluster))
    await until(lambda: any(s.decode_seen for s in cluster.gateway.streams), what="tokens from decode")
    (sequence,) = cluster.gateway.streams
    silence = SilenceWatch(worker.bus, cluster.gateway.streams)
    silence._answered(sequence, "prefill", "p0", SequenceStatus(sequence.key, "unknown"))
    worker.gate.set()
    assert text_of(await task) == TEXT


async def test_a_decode_worker_killed_in_mid_answer_ends_its_streams_with_an_error_event(cluster: Cluster) -> None:
    cluster.workers["d0"].gate_at = 3
    tasks = [asyncio.create_task(ask(cluster)) for _ in range(5)]
    await until(lambda: [len(s.token_ids) for s in cluster.gateway.streams] == [3] * 5, what="three tokens of each")
    await cluster.workers["d0"].die()
    began = time.monotonic()
    for task in tasks:
        events = await task
        assert events[-1]["error"]["code"] == "worker_lost"
        assert "'d0'" in events[-1]["error"]["message"]
        assert events[-1]["error"]["type"] == "worker_error"
        assert text_of(events[:-1]) == TOKENIZER.decode(cluster_ids(3), skip_special_tokens=True)
    assert time.monotonic() - began < 3.0
    assert len(cluster.gateway.streams) == 0
    assert cluster.gateway.workers.in_flight == {}


def cluster_ids(num: int) -> list[int]:
    return TOKENIZER.encode(TEXT, add_special_tokens=False)[:num]


async def test_new_requests_go_to_the_rest_after_a_worker_is_lost(cluster: Cluster) -> None:
    spare = await cluster.add("decode", "d1", says(TEXT))
    await cluster.see("d1")
    await cluster.workers["d0"].die()
    for _ in range(3):  # until the registry notices, some may still go to the dead one
        events = await ask(cluster)
        assert events[-1] == "[DONE]" or events[-1]["error"]["code"] == "worker_lost"
    await cluster.gateway.watch.wait_for(lambda snapshot: "d0" not in snapshot, 6.0)
    num_before = len(spare.submitted)
    for _ in range(3):
        assert text_of(await ask(cluster)) == TEXT
    assert len(spare.submitted) == num_before + 3


async def test_a_prefill_worker_killed_before_the_first_token_is_a_502_without_stream(cluster: Cluster) -> None:
    cluster.workers["p0"].gate_at = 0

    async def whole() -> Any:
        async with cluster.client() as client:
            return await client.post("/v1/completions", json=BODY | {"stream": False})

    task = asyncio.create_task(whole())
    await until(lambda: len(cluster.workers["p0"].submitted) == 1)
    began = time.monotonic()
    await cluster.workers["p0"].die()
    response = await task
    assert time.monotonic() - began < 3.0
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "worker_lost"
    assert "prefill worker 'p0'" in response.json()["error"]["message"]


async def test_a_prefill_worker_killed_after_the_hand_over_harms_nobody(cluster: Cluster) -> None:
    cluster.workers["d0"].gate_at = 3
    task = asyncio.create_task(ask(cluster))
    await until(lambda: len(cluster.workers["d0"].submitted) == 1)
    await cluster.workers["p0"].die()
    await cluster.gateway.watch.wait_for(lambda snapshot: "p0" not in snapshot, 6.0)
    cluster.workers["d0"].gate.set()
    assert text_of(await task) == TEXT


async def test_a_worker_that_was_restarted_and_knows_nothing_is_lost_for_its_streams(cluster: Cluster) -> None:
    cluster.workers["d0"].gate_at = 3
    task = asyncio.create_task(ask(cluster))
    await until(lambda: len(cluster.workers["d0"].submitted) == 1)
    worker = cluster.workers["d0"]
    worker._stop_all()
    worker.outbox.drop([r.key for r in worker.submitted])
    assert (await task)[-1]["error"]["code"] == "worker_lost"


async def test_an_error_of_the_worker_comes_as_it_is(cluster: Cluster) -> None:
    cluster.workers["d0"].gate_at = 3
    task = asyncio.create_task(ask(cluster))
    worker = cluster.workers["d0"]
    await until(lambda: len(worker.submitted) == 1)
    worker.outbox.finish(worker.submitted[0].key, "error", error=WorkerLost("the pool burnt", worker="d0"))
    await worker.outbox.flush()
    assert (await task)[-1]["error"]["message"] == "the pool burnt"


async def test_a_cut_of_the_gateways_bus_ends_no_stream() -> None:
    cluster = memory_cluster(registry_ttl_s=0.8)
    try:
        await cluster.add("decode", "d0", says(TEXT), gate_at=3)
        await cluster.add("prefill", "p0", says(TEXT))
        await cluster.start_gateway(silence_s=0.1)
        await cluster.see("p0", "d0")
        task = asyncio.create_task(ask(cluster))
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        bus = cluster.gateway_bus
        assert isinstance(bus, MemoryBus)
        bus.hub.cut(bus)
        cluster.workers["d0"].gate.set()  # these tokens are lost
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 1.5)  # longer than silence, strikes and TTL together
        assert not task.done()
        bus.hub.heal(bus)
        assert text_of(await task) == TEXT
    finally:
        await cluster.close()


async def test_a_request_past_its_deadline_ends_with_504() -> None:
    async with serving(says(TEXT), request_timeout_s=0.3) as cluster:
        cluster.workers["d0"].gate_at = 2
        events = await ask(cluster)
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        await until(lambda: bool(cluster.workers["d0"].cancelled), what="decode told")


class SilentWorker:
    """Takes a submission and every question, and never answers; its heartbeat may go on."""

    def __init__(self, *, accepts: bool) -> None:
        self.accepts = accepts
        self.cancelled: list[SequenceKey] = []
        self.submitted: list[SequenceKey] = []
        self.questions = 0

    async def __call__(self, delivery: Delivery) -> bytes:
        message = decode(delivery.data)
        if isinstance(message, SubmitRequest):
            self.submitted.append(message.key)
            if self.accepts:
                return encode(SubmitReply())
        if isinstance(message, CancelRequest):
            self.cancelled += message.keys
            return b""
        self.questions += isinstance(message, StatusRequest)
        await asyncio.Event().wait()
        return b""


async def test_a_worker_that_does_not_answer_a_submission_is_passed_over_and_told_to_forget_it() -> None:
    cluster = memory_cluster()
    try:
        await cluster.add("decode", "d0", says(TEXT))
        silent = SilentWorker(accepts=False)
        bus = await cluster._stack.enter_async_context(await cluster._connect("p0"))
        await cluster._stack.enter_async_context(await bus.serve(subjects.worker("prefill", "p0"), silent))
        await bus.registry().put(WorkerInfo(worker_id="p0", role="prefill", model=MODEL, status="ok", layout=LAYOUT))
        await cluster.start_gateway(submit_timeout_s=4.0, ttl_s=60.0)
        await cluster.see("p0", "d0")
        task = asyncio.create_task(ask(cluster))
        await until(lambda: bool(silent.submitted))
        spare = await cluster.add("prefill", "p1", says(TEXT))
        await cluster.see("p1")
        assert text_of(await task) == TEXT
        [request] = spare.submitted
        assert request.key.attempt == 1
        await until(lambda: bool(silent.cancelled), what="p0 told to forget it")
        assert silent.cancelled[0].attempt == 0
    finally:
        await cluster.close()


@pytest.mark.parametrize(("drains", "status", "code"), [(False, 504, "deadline_exceeded"), (True, 503, "draining")])
async def test_what_ends_a_sequence_during_its_submission_is_told_as_it_is(
    drains: bool, status: int, code: str
) -> None:
    cluster = memory_cluster()
    try:
        await cluster.add("decode", "d0", says(TEXT))
        silent = SilentWorker(accepts=False)
        bus = await cluster._stack.enter_async_context(await cluster._connect("p0"))
        await cluster._stack.enter_async_context(await bus.serve(subjects.worker("prefill", "p0"), silent))
        await bus.registry().put(WorkerInfo(worker_id="p0", role="prefill", model=MODEL, status="ok", layout=LAYOUT))
        timeout_s = 60.0 if drains else 0.3
        await cluster.start_gateway(submit_timeout_s=2.0, reply_timeout_s=0.5, request_timeout_s=timeout_s, ttl_s=60.0)
        await cluster.see("p0", "d0")
        async with cluster.client() as client:
            task = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await until(lambda: bool(silent.submitted))
            if drains:
                assert await cluster.gateway.drain(0.0) is False
            response = await task
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    finally:
        await cluster.close()


async def test_an_answer_that_is_complete_before_its_submission_is_acknowledged_is_no_error(cluster: Cluster) -> None:
    worker = cluster.workers["p0"]
    submit = worker.submit

    def accepts_and_dies(request: SubmitRequest) -> SubmitReply:
        submit(request)
        raise Overloaded("the reply is lost, the work is done")

    ended = asyncio.Event()
    streams = cluster.gateway.streams
    request = cluster.gateway_bus.request

    async def late(subject: str, data: bytes, **options: Any) -> bytes:
        answer = await request(subject, data, **options)
        if subject == subjects.worker("prefill", "p0") and isinstance(decode(data), SubmitRequest):
            await until(lambda: len(streams) == 0, what="the end")
            ended.set()
        return answer

    worker.submit = accepts_and_dies  # type: ignore[method-assign]
    cluster.gateway_bus.request = late
    assert text_of(await ask(cluster)) == TEXT
    assert ended.is_set()


async def test_what_came_early_of_a_void_attempt_is_forgotten() -> None:
    live = LiveSequence("r", 0, [1], SamplingParams(max_tokens=9), Inbox(), 1e9)
    live.place("p0", "d0")
    live.accept(TokenChunk(SequenceKey("r"), 1, [66]), "d0")
    live.withdraw()
    live.place("p1", "d1")
    live.accept(TokenChunk(SequenceKey("r", 0, 1), 0, [7]), "p1")
    assert live.token_ids == [7]


async def test_a_frozen_worker_ends_its_streams_within_three_seconds() -> None:
    cluster = memory_cluster()
    try:
        silent = SilentWorker(accepts=True)
        bus = await cluster._stack.enter_async_context(await cluster._connect("d0"))
        await cluster._stack.enter_async_context(await bus.serve(subjects.worker("decode", "d0"), silent))
        info = WorkerInfo(worker_id="d0", role="decode", model=MODEL, status="ok", layout=LAYOUT, colocated=True)
        await cluster.start_gateway()
        await bus.registry().put(info)  # the last beat before it froze
        await cluster.see("d0")
        began = time.monotonic()
        events = await ask(cluster)
        assert events[-1]["error"]["code"] == "worker_lost"
        assert time.monotonic() - began < 3.0
        assert silent.questions >= 1
    finally:
        await cluster.close()


async def test_a_gain_too_large_for_a_message_ends_the_request_with_that_error() -> None:
    cluster = memory_cluster(max_payload_bytes=2000)
    try:
        await cluster.add("decode", "d0", says(TEXT))
        await cluster.add("prefill", "p0", says(TEXT))
        await cluster.start_gateway(silence_s=0.1)
        await cluster.see("p0", "d0")
        cluster.gateway.pipeline.intake.max_payload_bytes = lambda: 10**6  # an estimate that was wrong
        [*_, last] = await ask(cluster, prompt=[300] * 100, echo=True, logprobs=5)
        assert last["error"]["code"] == "payload_too_large"
        assert len(cluster.gateway.streams) == 0
    finally:
        await cluster.close()


async def test_a_batch_that_is_no_message_harms_nobody(cluster: Cluster) -> None:
    worker = cluster.workers["d0"]
    await worker.bus.publish(subjects.stream("gw"), b"\x09\x00nonsense")
    await worker.bus.publish(subjects.stream("gw"), b"")
    assert text_of(await ask(cluster)) == TEXT


async def test_a_worker_that_goes_on_with_a_sequence_nobody_wants_is_told_again(cluster: Cluster) -> None:
    worker = cluster.workers["d0"]
    stray = SequenceKey("long-gone")
    worker.outbox.open(stray, "gw")
    worker.outbox.append(stray, 5)
    await worker.outbox.flush()
    await until(lambda: stray in worker.cancelled, what="told to stop")


async def test_the_record_of_what_workers_were_told_is_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "MAX_TOLD", 5)
    async with cluster.client() as client:
        for _ in range(12):  # each is cancelled by its stop string
            response = await client.post("/v1/completions", json=BODY | {"stream": False, "stop": "France"})
            assert response.json()["choices"][0]["text"] == "The capital of "
    told = cluster.gateway.streams._told
    assert len(told) == 5
    assert list(told.values()) == sorted(told.values())


async def test_an_error_at_submission_leaves_nothing_live(cluster: Cluster) -> None:
    cluster.workers["p0"].refusal = DistServeError("out of luck")
    async with cluster.client() as client:
        response = await client.post("/v1/completions", json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "out of luck"
    assert len(cluster.gateway.streams) == 0
    assert cluster.gateway.workers.in_flight == {}


def test_a_status_reply_round_trips() -> None:
    reply = StatusReply(sequences=[SequenceStatus(SequenceKey("a"), "unknown")])
    assert decode(encode(reply)) == reply
