"""Silence, and messages that are lost, doubled, late or nonsense: what is missing is asked for, and comes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from distserve.bus import subjects
from distserve.messages import SamplingParams, SequenceKey, SequenceStatus, StatusReply, TokenChunk, decode, encode
from distserve_gateway import streams as streams_module
from distserve_gateway.live import Inbox, LiveSequence
from distserve_gateway.silence import SilenceWatch
from tests.unit.gateway.scripted import TOKENIZER, Cluster, ScriptedWorker, memory_cluster, says, serving
from tests.unit.gateway.streamed import BODY, TEXT, ask, text_of
from tests.waiting import until

NUM = len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with serving(says(TEXT), silence_s=0.1) as cluster:
        yield cluster


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


async def test_what_came_early_of_a_void_attempt_is_forgotten() -> None:
    live = LiveSequence("r", 0, [1], SamplingParams(max_tokens=9), Inbox(), 1e9)
    live.place("p0", "d0")
    live.accept(TokenChunk(SequenceKey("r"), 1, [66]), "d0")
    live.withdraw()
    live.place("p1", "d1")
    live.accept(TokenChunk(SequenceKey("r", 0, 1), 0, [7]), "p1")
    assert live.token_ids == [7]


async def test_a_batch_that_is_no_message_harms_nobody(cluster: Cluster) -> None:
    worker = cluster.workers["d0"]
    await worker.bus.publish(subjects.stream("gw"), b"\x09\x00nonsense")
    await worker.bus.publish(subjects.stream("gw"), b"")
    assert text_of(await ask(cluster)) == TEXT


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


def test_a_status_reply_round_trips() -> None:
    reply = StatusReply(sequences=[SequenceStatus(SequenceKey("a"), "unknown")])
    assert decode(encode(reply)) == reply
