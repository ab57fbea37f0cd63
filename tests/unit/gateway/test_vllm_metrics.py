"""The gateway's figures under vLLM's names."""

import re
from typing import Literal

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from distserve.bus.base import RegistryEvent
from distserve.messages import Load, WorkerInfo
from distserve_gateway.vllm_metrics import MOST_WORKERS, Preemptions
from tests.unit.gateway.measured import samples
from tests.unit.gateway.scripted import Cluster, says, serving

# As vLLM's own exposition has them: name of the family, and its type.
NAMES = {
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:request_success_total": "counter",
    "vllm:num_preemptions_total": "counter",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
}
OPEN_METRICS = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5"  # as Prometheus asks
BODY = {"prompt": "a b", "max_tokens": 50}


async def scrape(cluster: Cluster, accept: str = "*/*") -> httpx.Response:
    async with cluster.client() as client:
        return await client.get("/metrics", headers={"accept": accept})


async def test_without_the_switch_there_are_none() -> None:
    async with serving(says("x")) as cluster:
        assert "vllm:" not in (await scrape(cluster)).text


@pytest.mark.parametrize("accept", ["*/*", OPEN_METRICS, "application/openmetrics-text", "text/plain"])
async def test_names_and_types_are_vllms_whatever_the_scrape_accepts(accept: str) -> None:
    async with serving(says("x"), vllm_metric_names=True) as cluster:
        response = await scrape(cluster, accept)
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        types = dict(re.findall(r"^# TYPE (vllm:\S+) (\S+)$", response.text, re.MULTILINE))
        assert types == NAMES
        helped = re.findall(r"^# HELP (vllm:\S+) \S", response.text, re.MULTILINE)
        assert set(helped) == NAMES.keys()
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name.startswith("vllm:"):
                    assert sample.labels["model_name"] == "tiny"
                    assert set(sample.labels) <= {"model_name", "le", "finished_reason"}


async def test_they_are_the_gateways_own_numbers() -> None:
    async with serving(says("one two three"), vllm_metric_names=True) as cluster:
        cluster.workers["p0"].num_cached = lambda request: 1
        for worker, load in (
            ("p0", Load(num_running=2, num_waiting=3, free_blocks=1, total_blocks=100)),
            ("d0", Load(num_running=5, num_waiting=1, free_blocks=75, total_blocks=100)),
        ):
            cluster.workers[worker].load = load
        await cluster.gateway.watch.wait_for(lambda seen: seen["d0"].load.num_running == 5, 5.0)
        await cluster.gateway.watch.wait_for(lambda seen: seen["p0"].load.num_running == 2, 5.0)
        async with cluster.client() as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            assert (await client.post("/v1/completions", json=BODY | {"max_tokens": 2, "n": 2})).status_code == 200
        text = (await scrape(cluster)).text
        found = samples(text)
        for ours, theirs in (
            ("distserve_gateway_ttft_seconds", "vllm:time_to_first_token_seconds"),
            ("distserve_gateway_itl_seconds", "vllm:inter_token_latency_seconds"),
            ("distserve_gateway_itl_seconds", "vllm:time_per_output_token_seconds"),
            ("distserve_gateway_tpot_seconds", "vllm:request_time_per_output_token_seconds"),
            ("distserve_gateway_e2e_seconds", "vllm:e2e_request_latency_seconds"),
        ):
            mine = re.findall(rf'^{ours}_bucket{{le="([^"]+)",model="tiny"}} (\S+)$', text, re.MULTILINE)
            other = re.findall(rf'^{theirs}_bucket{{le="([^"]+)",model_name="tiny"}} (\S+)$', text, re.MULTILINE)
            assert mine
            assert mine == other
            assert found[f"{ours}_sum"] == found[f"{theirs}_sum"]
        assert found["distserve_gateway_ttft_seconds_count"] == 3, "once, under whatever name"
        for ours, theirs in (
            ("distserve_gateway_prompt_tokens_total", "vllm:prompt_tokens_total"),
            ("distserve_gateway_output_tokens_total", "vllm:generation_tokens_total"),
            ("distserve_gateway_prompt_tokens_total", "vllm:prefix_cache_queries_total"),
            ("distserve_gateway_cached_tokens_total", "vllm:prefix_cache_hits_total"),
            ("distserve_gateway_prompt_tokens_total", "vllm:request_prompt_tokens_sum"),
            ("distserve_gateway_output_tokens_total", "vllm:request_generation_tokens_sum"),
            ("distserve_gateway_stage_seconds_sum{stage=queue}", "vllm:request_queue_time_seconds_sum"),
            ("distserve_gateway_stage_seconds_sum{stage=prefill}", "vllm:request_prefill_time_seconds_sum"),
            ("distserve_gateway_stage_seconds_sum{stage=decode}", "vllm:request_decode_time_seconds_sum"),
        ):
            assert found[ours] == found[theirs] > 0, theirs
        reasons = {r: found[f"vllm:request_success_total{{finished_reason={r}}}"] for r in ("stop", "length", "abort")}
        assert reasons == {"stop": 1, "length": 2, "abort": 0}
        assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (7, 4)
        assert found["vllm:kv_cache_usage_perc"] == pytest.approx(0.25)


def info(worker_id: str, num: int, pid: int = 1) -> WorkerInfo:
    return WorkerInfo(worker_id=worker_id, role="decode", pid=pid, load=Load(num_preemptions=num))


def put(worker_id: str, num: int, pid: int = 1) -> RegistryEvent:
    return RegistryEvent("put", worker_id, info(worker_id, num, pid))


def gone(worker_id: str, reason: Literal["left", "expired"]) -> RegistryEvent:
    return RegistryEvent("gone", worker_id, None, reason)


def test_preemptions_only_grow_though_workers_come_and_go() -> None:
    preemptions = Preemptions([info("d0", 10)])
    for event, total in (
        (put("d0", 10), 0),
        (put("d0", 12), 2),
        (put("d1", 3), 5),
        (gone("d0", "expired"), 5),
        (put("d1", 4), 6),
        (put("d0", 1), 7),  # another life of that name
        (put("d1", 0), 7),
        (put("d1", 2), 9),
    ):
        preemptions.on_event(event)
        assert preemptions.total == total


@pytest.mark.parametrize(
    ("events", "total"),
    [
        ([put("d0", 500), gone("d0", "expired"), put("d0", 503)], 3),  # it was silent, and is still the same
        ([put("d0", 500), gone("d0", "expired"), put("d0", 503, pid=2)], 503),  # died, and was started anew
        ([put("d0", 500), gone("d0", "left"), put("d0", 503, pid=2)], 503),
        ([put("d0", 500), gone("d0", "expired"), put("d0", 2)], 2),  # in a container, where each is process 1
        ([put("d0", 502, pid=2)], 502),  # nobody saw the first one leave
    ],
)
def test_a_worker_that_comes_back_is_counted_from_where_its_process_was(
    events: list[RegistryEvent], total: int
) -> None:
    preemptions = Preemptions([info("d0", 500)])
    for event in events:
        preemptions.on_event(event)
    assert preemptions.total == total


def test_of_workers_that_have_gone_so_many_are_remembered() -> None:
    preemptions = Preemptions([info("stays", 10)])
    for i in range(MOST_WORKERS + 10):
        preemptions.on_event(put(f"d{i}", 0))
        preemptions.on_event(gone(f"d{i}", "expired"))
        preemptions.on_event(put("stays", 10))
    assert len(preemptions._seen) == MOST_WORKERS
    assert preemptions.total == 0, "one that beats is not forgotten"


async def test_help_says_where_a_sequence_is_counted_twice() -> None:
    async with serving(says("x"), vllm_metric_names=True) as cluster:
        (text,) = re.findall(r"^# HELP vllm:num_requests_waiting (.*)$", (await scrape(cluster)).text, re.MULTILINE)
        assert "waits for room at a decode worker, is among the running, too" in text
