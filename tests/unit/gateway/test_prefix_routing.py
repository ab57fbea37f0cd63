"""From a worker's events to where a request goes, and from the workers' counts to its usage."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from distserve.errors import BlocksMissing, Draining, InvalidRequest, Overloaded
from distserve.messages import SubmitRequest
from distserve_gateway import dispatch
from tests.unit.gateway.scripted import Cluster, memory_cluster, names, says
from tests.waiting import until

PROMPT = list(range(200, 320))  # 120 tokens, 7 full blocks
LONG = [*PROMPT, *range(320, 390)]
TEXT = "one two three"


@asynccontextmanager
async def four_workers(**options: Any) -> AsyncIterator[Cluster]:
    """p0, p1, d0, d1; of equals routing takes p0 and d0."""
    cluster = memory_cluster()
    try:
        for worker_id in ("d0", "d1"):
            await cluster.add("decode", worker_id, says(TEXT))
        for worker_id in ("p0", "p1"):
            await cluster.add("prefill", worker_id, says(TEXT))
        await cluster.start_gateway(**options)
        await cluster.see("p0", "p1", "d0", "d1")
        index = cluster.gateway.kv.index
        await until(lambda: all(w in index and index.lacks(w) is None for w in cluster.workers), what="snapshots")
        yield cluster
        await until(lambda: cluster.gateway.workers.in_flight == {})
        assert cluster.gateway.workers.prefilling == {}
        index.check()
    finally:
        await cluster.close()


async def holds(cluster: Cluster, worker_id: str, token_ids: list[int], cache_salt: str = "") -> None:
    worker = cluster.workers[worker_id]
    await worker.blocks.store(*names(token_ids, cache_salt))
    index = cluster.gateway.kv.index
    await until(lambda: index.holders.get(worker_id, {}) == worker.blocks.numbers, what="the events")


async def ask(cluster: Cluster, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    async with cluster.client() as client:
        response = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20} | fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


def told(cluster: Cluster, worker_id: str) -> list[SubmitRequest]:
    return cluster.workers[worker_id].submitted


async def test_a_request_goes_where_its_prefix_is() -> None:
    async with four_workers(max_local_prefill_tokens=0) as cluster:
        await ask(cluster)
        assert told(cluster, "p0")[-1].holder == ""
        await holds(cluster, "p1", PROMPT)
        await holds(cluster, "d1", PROMPT)
        await ask(cluster)
        assert told(cluster, "p1")[-1].decode_worker == "d1"
        assert told(cluster, "p1")[-1].holder == ""  # prefill has it itself
        await ask(cluster, cache_salt="other tenant")
        assert told(cluster, "p0")[-1].decode_worker == "d0"
        await cluster.workers["p1"].blocks.send(cluster.workers["p1"].blocks.change(removed=names(PROMPT)))
        await until(lambda: "p1" not in cluster.gateway.kv.index.holders)
        await ask(cluster)
        assert told(cluster, "p0")[-1].holder == told(cluster, "p0")[-1].decode_worker == "d1"


async def test_a_dead_worker_s_cache_attracts_nobody() -> None:
    async with four_workers(max_local_prefill_tokens=0) as cluster:
        await holds(cluster, "d1", PROMPT)
        await cluster.workers["d1"].die()
        await until(lambda: "d1" not in cluster.gateway.watch.snapshot)
        await ask(cluster)
        assert (told(cluster, "p0")[-1].decode_worker, told(cluster, "p0")[-1].holder) == ("d0", "")
        assert cluster.gateway.kv.index.num_hints == 0


async def test_a_decode_worker_that_holds_all_but_few_is_asked_directly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, dispatch.__name__)
    async with four_workers() as cluster:
        await holds(cluster, "d1", PROMPT)
        d1 = cluster.workers["d1"]
        d1.gate_at = 2
        task = asyncio.create_task(ask(cluster))
        await until(lambda: any(s.token_ids for s in cluster.gateway.streams))
        assert "local prefill: decode holds 112 of 120 prompt tokens" in caplog.text
        assert cluster.gateway.workers.prefilling == {}  # it has computed them
        assert cluster.gateway.workers.in_flight == {"d1": 120}
        d1.gate.set()
        assert (await task)["choices"][0]["text"] == TEXT
        [request] = d1.submitted
        assert request.decode_worker is None
        assert told(cluster, "p0") == told(cluster, "p1") == []


async def test_what_a_decode_worker_computes_itself_counts_until_its_first_token() -> None:
    async with four_workers() as cluster:
        await holds(cluster, "d1", PROMPT)
        cluster.workers["d1"].gate_at = 0
        task = asyncio.create_task(ask(cluster))
        await until(lambda: cluster.gateway.workers.prefilling == {"d1": 8})
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        cluster.gateway.streams.fail_all(Draining("the test is over"))
        assert cluster.gateway.workers.prefilling == {}


@pytest.mark.parametrize(
    "refusal",
    [
        BlocksMissing("evicted", num_present=0, tier="pool"),
        Overloaded("busy"),
        Draining("leaving"),
        InvalidRequest("this decode worker takes hand-overs only", param="decode_worker"),
    ],
)
async def test_a_decode_worker_that_refuses_is_passed_over_at_once(refusal: Exception) -> None:
    async with four_workers(submit_timeout_s=0.5) as cluster:
        await holds(cluster, "d1", PROMPT)
        cluster.workers["d1"].refusal = refusal  # type: ignore[assignment]
        began = asyncio.get_running_loop().time()
        assert (await ask(cluster))["choices"][0]["text"] == TEXT
        assert asyncio.get_running_loop().time() - began < 0.4
        [request] = told(cluster, "p0")
        assert request.key.attempt == 1
        # One that is leaving takes no hand-over and answers no fetch; the others keep what they hold.
        gone = isinstance(refusal, Draining)
        assert (request.decode_worker, request.holder) == (("d0", "") if gone else ("d1", "d1"))


async def test_a_decode_worker_that_died_unseen_is_passed_over_at_once() -> None:
    async with four_workers() as cluster:
        await holds(cluster, "d1", PROMPT)
        await cluster.workers["d1"].bus.close()
        await ask(cluster)
        assert told(cluster, "p0")[-1].decode_worker == "d0"


async def test_a_conversation_stays_with_its_workers() -> None:
    async with four_workers() as cluster:
        p1, d1 = cluster.workers["p1"], cluster.workers["d1"]
        cluster.gateway.workers.sent("p0", 500)  # others' load sends the first turn to p1 and d1
        cluster.gateway.workers.sent("d0", 500)
        await ask(cluster, session_id="talk")
        cluster.gateway.workers.relieved("p0", 500)
        cluster.gateway.workers.relieved("d0", 500)
        await ask(cluster)
        assert [len(told(cluster, w)) for w in ("p0", "d0", "p1", "d1")] == [1, 1, 1, 1]
        await ask(cluster, session_id="talk")
        assert [len(w.submitted) for w in (p1, d1)] == [2, 2]
        await ask(cluster, session_id="talk", cache_salt="another tenant's talk")
        assert [len(w.submitted) for w in (p1, d1)] == [2, 2]


async def test_it_stays_with_the_decode_worker_that_has_it_in_the_end() -> None:
    async with four_workers() as cluster:
        cluster.workers["p0"].redirect = "d1"  # as if d0 had refused the hand-over
        await ask(cluster, user="u")
        cluster.workers["p0"].redirect = ""
        await ask(cluster, user="u")
        assert told(cluster, "p0")[-1].decode_worker == "d1"


async def usage(cluster: Cluster, **fields: Any) -> int:
    whole = (await ask(cluster, **fields))["usage"]["prompt_tokens_details"]["cached_tokens"]
    async with cluster.client() as client:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20} | fields | options)
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line[6:].startswith("{")]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == whole
    return int(whole)


async def test_usage_says_what_was_cached_streamed_or_not() -> None:
    async with four_workers() as cluster:

        def cached(request: SubmitRequest) -> int:
            """The first to be computed of a prompt's outputs finds less than the others."""
            found = {PROMPT[0]: 64, LONG[0] + 1: 32}.get(request.token_ids[0], 0)
            return found if request.key.output_index % 3 == 1 else found + 32 * bool(found)

        for worker in cluster.workers.values():
            worker.num_cached = cached
        assert await usage(cluster, prompt=[5, 6, 7]) == 0
        assert await usage(cluster) == 96
        assert await usage(cluster, n=3) == 64
        assert await usage(cluster, prompt=[PROMPT, [t + 1 for t in PROMPT]], n=3) == 64 + 32
        async with cluster.client() as client:
            text = (await client.get("/metrics")).text
        total = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
        assert total["distserve_gateway_cached_tokens_total"] == 2 * (96 + 64 + 96)
        assert total["distserve_gateway_kv_snapshots"] == 4


async def test_running_usage_counts_outputs_that_have_begun() -> None:
    async with four_workers() as cluster:
        for worker in cluster.workers.values():
            worker.num_cached = lambda request: 64
        async with cluster.client() as client:
            options = {"include_usage": True, "continuous_usage_stats": True}
            body = {"prompt": PROMPT, "max_tokens": 20, "n": 2, "stream": True, "stream_options": options}
            text = (await client.post("/v1/completions", json=body)).text
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line[6:].startswith("{")]
        assert {e["usage"]["prompt_tokens_details"]["cached_tokens"] for e in events} == {64}


async def test_n_outputs_are_looked_up_once_and_prompt_logprobs_never(monkeypatch: pytest.MonkeyPatch) -> None:
    async with four_workers() as cluster:
        await holds(cluster, "d1", PROMPT)
        prefixes = cluster.gateway.pipeline._submission._prefixes
        assert prefixes is not None
        held, asked = prefixes.held, []

        async def counted(token_ids: list[int], cache_salt: str) -> dict[str, int]:
            asked.append(token_ids)
            return await held(token_ids, cache_salt)

        monkeypatch.setattr(prefixes, "held", counted)
        await ask(cluster, prompt=[PROMPT, LONG], n=3)
        assert asked == [PROMPT, LONG]
        await ask(cluster, echo=True, logprobs=1)
        assert len(asked) == 2
        assert all(len(w.submitted) < 8 for w in cluster.workers.values())


async def test_routes_are_counted_by_kind() -> None:
    async with four_workers() as cluster:
        await ask(cluster)
        await holds(cluster, "d1", PROMPT)
        await ask(cluster)
        async with cluster.client() as client:
            text = (await client.get("/metrics")).text
        found = {
            sample.labels["kind"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "distserve_gateway_routes_total"
        }
        assert found == {"pair": 1, "local": 1, "spill": 0, "alone": 0, "colocated": 0}
