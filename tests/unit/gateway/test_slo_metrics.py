"""What a gateway counts of requests: promises kept and broken, goodput, refusals, tries, stages."""

import asyncio

import msgspec
import pytest

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.errors import Overloaded, WorkerLost
from distserve.messages import (
    Load,
    SubmitReply,
    SubmitRequest,
    TokenBatch,
    TokenChunk,
    WorkerInfo,
    decode_as,
    encode,
)
from distserve_gateway.admission import Admission
from tests.unit.gateway import vocabularies
from tests.unit.gateway.keyed import bearer, key, keyed
from tests.unit.gateway.measured import measured
from tests.unit.gateway.scripted import LAYOUT, MODEL, TOKENIZER, Cluster, memory_cluster, says, serving
from tests.waiting import until

BODY = {"prompt": "a", "max_tokens": 50}
TEXT = "one two three"
SLO = "distserve_gateway_slo_requests_total"
GOOD = "distserve_gateway_good_requests_total"
REFUSED = "distserve_gateway_refused_requests_total"


async def post(cluster: Cluster, **fields: object) -> int:
    async with cluster.client() as client:
        return (await client.post("/v1/completions", json=BODY | fields)).status_code


async def test_promises_are_judged_once_at_the_end_by_class() -> None:
    async with serving(says(TEXT)) as cluster:
        assert await post(cluster) == 200
        assert await post(cluster, ttft_slo_ms=5000, priority="vip") == 200
        assert await post(cluster, ttft_slo_ms=5000, tpot_slo_ms=0.0001, priority="batch") == 200
        found = measured(cluster)
        assert {name: value for name, value in found.items() if name.startswith(SLO) and value} == {
            f"{SLO}{{attained=unpromised,priority=normal}}": 1,
            f"{SLO}{{attained=yes,priority=vip}}": 1,
            f"{SLO}{{attained=no,priority=batch}}": 1,
        }
        assert [found[f"{GOOD}{{priority={priority}}}"] for priority in ("vip", "normal", "batch")] == [1, 1, 0]
        num_tokens = len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1
        assert found["distserve_gateway_tpot_seconds_count"] == 3
        assert found["distserve_gateway_itl_seconds_count"] == 3 * (num_tokens - 1)
        for stage, seconds in (("queue", 0.1), ("prefill", 0.2), ("transfer", 0.3), ("decode", 0.4)):
            assert found[f"distserve_gateway_stage_seconds_count{{stage={stage}}}"] == 3
            assert found[f"distserve_gateway_stage_seconds_sum{{stage={stage}}}"] == pytest.approx(3 * seconds)


async def test_a_late_first_token_breaks_the_promise() -> None:
    async with serving(says(TEXT)) as cluster:
        for worker in cluster.workers.values():
            worker.gate_at = 0
        asked = asyncio.create_task(post(cluster, ttft_slo_ms=50))
        await until(lambda: bool(cluster.workers["p0"].submitted))
        await asyncio.sleep(0.06)  # the promise goes by
        for worker in cluster.workers.values():
            worker.gate.set()
        assert await asked == 200
        assert measured(cluster)[f"{SLO}{{attained=no,priority=normal}}"] == 1
        assert measured(cluster)[f"{GOOD}{{priority=normal}}"] == 0


async def test_one_that_fails_has_not_got_its_promise_and_is_a_trouble() -> None:
    async with serving(says(TEXT)) as cluster:
        cluster.workers["d0"].gate_at = 2
        asked = asyncio.create_task(post(cluster, deadline_ms=60_000))
        await until(lambda: bool(cluster.workers["d0"].submitted))
        cluster.gateway.streams.fail_all(WorkerLost("decode worker 'd0' died", worker="d0", role="decode"))
        assert await asked == 502
        assert measured(cluster)[f"{SLO}{{attained=no,priority=normal}}"] == 1
        assert cluster.gateway.metrics.num_failed == 1
        (trouble,) = cluster.gateway.windows.troubles()
        assert (trouble.service, trouble.code) == ("d0", "worker_lost")
        assert trouble.message.endswith(": decode worker 'd0' died")


async def test_a_client_that_leaves_in_time_says_nothing_about_promises() -> None:
    async with serving(says(TEXT)) as cluster:
        cluster.workers["d0"].gate_at = 2
        asked = asyncio.create_task(post(cluster, ttft_slo_ms=60_000))
        await until(lambda: bool(cluster.workers["d0"].submitted))
        async with cluster.client() as client:
            (run,) = (await client.get("/v1/requests")).json()["data"]
            assert (await client.delete(f"/v1/requests/{run['id']}")).status_code == 200
        assert await asked == 499
        found = measured(cluster)
        assert found[f"{SLO}{{attained=unpromised,priority=normal}}"] == 1
        assert found[f"{GOOD}{{priority=normal}}"] == 0


async def test_the_refused_are_apart_and_tries_are_counted_by_reason() -> None:
    async with serving(says(TEXT)) as cluster:
        cluster.workers["p0"].refusal = Overloaded("full")
        assert await post(cluster, priority="batch", ttft_slo_ms=400) == 429
        found = measured(cluster)
        assert found[f"{REFUSED}{{priority=batch}}"] == 1
        assert found["distserve_gateway_retries_total{reason=overloaded}"] >= 1
        assert not any(value for name, value in found.items() if name.startswith(SLO))
        assert cluster.gateway.metrics.num_failed == 0
        retries = "distserve_gateway_retries_total{reason=overloaded}"
        cluster.workers["p0"].refusal = None
        assert await post(cluster) == 200
        assert measured(cluster)[retries] == found[retries], "a first try is none"
        assert [name for name in measured(cluster) if "retries_total" in name] == [retries]


async def test_a_request_that_is_turned_away_at_the_door_counts_in_its_class() -> None:
    async with serving(says(TEXT)) as cluster:
        admission: Admission = cluster.gateway._admission
        admission.draining = True
        assert await post(cluster, priority="vip") == 503
        admission.draining = False
        assert await post(cluster, top_p=7) == 400
        found = measured(cluster)
        assert [found[f"{REFUSED}{{priority={priority}}}"] for priority in ("vip", "normal", "batch")] == [1, 0, 0]
        assert (cluster.gateway.metrics.num_started, cluster.gateway.metrics.num_ended) == (2, 2)


@pytest.mark.parametrize(("broken", "outcome"), [(False, "cancelled"), (True, "internal_error")])
async def test_one_that_ends_on_its_way_in_is_counted_as_ended(
    monkeypatch: pytest.MonkeyPatch, broken: bool, outcome: str
) -> None:
    async with serving(says(TEXT)) as cluster:
        pipeline, metrics = cluster.gateway.pipeline, cluster.gateway.metrics
        is_in = asyncio.Event()

        async def tokenise(texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
            is_in.set()
            if broken:
                raise RuntimeError("a fault of ours")
            await asyncio.Event().wait()
            return []

        monkeypatch.setattr(pipeline.tokenizer, "encode_off_loop", tokenise)
        coming = asyncio.create_task(pipeline.begin("completion", msgspec.json.encode(BODY)))
        await asyncio.wait_for(is_in.wait(), 5.0)
        if not broken:
            coming.cancel()
        with pytest.raises(RuntimeError if broken else asyncio.CancelledError):
            await coming
        assert (metrics.num_started, metrics.num_ended) == (1, 1)
        assert metrics.requests == {("completion", outcome): 1}


async def test_one_over_its_keys_limits_counts_in_the_class_that_it_asked_for_once_that_is_known() -> None:
    keys = (key("few", requests_per_minute=1, priority="batch"), key("short", tokens_per_minute=10, priority="vip"))
    async with keyed(says(TEXT), *keys) as cluster, cluster.client() as client:

        async def asked(name: str, **fields: object) -> int:
            answer = await client.post("/v1/completions", json=BODY | {"max_tokens": 2} | fields, headers=bearer(name))
            return answer.status_code

        assert [await asked("few"), await asked("few")] == [200, 429], "before its body is read"
        assert await asked("short", priority="normal", max_tokens=100) == 429, "after"
        found = measured(cluster)
        assert [found[f"{REFUSED}{{priority={priority}}}"] for priority in ("vip", "normal", "batch")] == [0, 1, 1]


async def test_a_worker_that_leaves_without_a_word_is_a_trouble() -> None:
    cluster = memory_cluster(registry_ttl_s=1.0)
    try:
        await cluster.add("decode", "d0", says(TEXT))
        await cluster.add("decode", "d1", says(TEXT))
        gateway = await cluster.start_gateway(beat_s=0.2)
        await cluster.see("d0", "d1")
        await cluster.workers["d0"].__aexit__(None, None, None)  # it says goodbye
        await cluster.workers["d1"].die()
        await until(lambda: bool(gateway.windows.troubles()))
        assert [(t.service, t.code) for t in gateway.windows.troubles()] == [("d1", "worker_lost")]
    finally:
        await cluster.close()


async def test_a_sequence_whose_last_token_overtakes_the_reply_was_taken_all_the_same() -> None:
    cluster = memory_cluster()
    try:
        await cluster.add("decode", "d0", says(TEXT))
        bus = await cluster._stack.enter_async_context(await cluster._connect("p0"))

        async def quick(delivery: Delivery) -> bytes:
            request = decode_as(SubmitRequest, delivery.data)
            chunk = TokenChunk(key=request.key, start=0, token_ids=[vocabularies.EOS_ID], finish_reason="stop")
            batch = TokenBatch(worker="p0", serial=1, chunks=[chunk])
            await bus.publish(subjects.stream(request.gateway), encode(batch))
            await until(lambda: not len(cluster.gateway.streams))
            return encode(SubmitReply())

        await cluster._stack.enter_async_context(await bus.serve(subjects.worker("prefill", "p0"), quick))
        await bus.registry().put(WorkerInfo(worker_id="p0", role="prefill", model=MODEL, status="ok", layout=LAYOUT))
        await cluster.start_gateway(ttl_s=60.0)
        await cluster.see("p0", "d0")
        assert await post(cluster) == 200
        assert measured(cluster)["distserve_gateway_routes_total{kind=pair}"] == 1
    finally:
        await cluster.close()


async def test_several_outputs_are_one_request_that_is_as_slow_as_its_slowest() -> None:
    async with serving(says(TEXT)) as cluster:
        assert await post(cluster, n=3, ttft_slo_ms=60_000) == 200
        found = measured(cluster)
        assert found[f"{SLO}{{attained=yes,priority=normal}}"] == 1
        assert found["distserve_gateway_ttft_seconds_count"] == 3
        assert found["distserve_gateway_tpot_seconds_count"] == 3
        assert found["distserve_gateway_stage_seconds_count{stage=decode}"] == 1


async def test_the_last_second_and_the_bus_are_shown() -> None:
    async with serving(says(TEXT)) as cluster:
        assert await post(cluster) == 200
        p50 = "distserve_gateway_second_ttft_seconds{quantile=0.5}"
        await until(lambda: measured(cluster)[p50] > 0)
        found = measured(cluster)
        assert found["distserve_bus_connected"] == 1
        assert found["distserve_bus_reconnects_total"] == 0
        assert any(name.startswith("distserve_build_info{role=gateway,version=") for name in found)
        cluster.gateway_bus.hub.cut(cluster.gateway_bus)
        assert measured(cluster)["distserve_bus_connected"] == 0
        cluster.gateway_bus.hub.heal(cluster.gateway_bus)
        assert measured(cluster)["distserve_bus_reconnects_total"] == 1


async def test_load_in_the_registry_carries_preemptions() -> None:
    load = Load(num_preemptions=3)
    async with serving(says(TEXT), vllm_metric_names=True) as cluster:
        assert measured(cluster)["vllm:num_preemptions_total"] == 0
        cluster.workers["d0"].load = load
        await cluster.gateway.watch.wait_for(lambda seen: seen["d0"].load.num_preemptions == 3, 5.0)
        assert measured(cluster)["vllm:num_preemptions_total"] == 3
