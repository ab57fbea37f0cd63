"""Real workers say over HTTP what they moved, by which transport and class, and the gateway says where to ask."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from distserve import __version__
from tests.cluster import Cluster, wait_until

pytestmark = pytest.mark.e2e

PROMPTS = [("decode", 40), ("background", 100), ("background", 17), (None, 33)]  # class asked for, tokens


def test_bytes_are_counted_by_class_on_both_sides(tiny_llama: Path, tmp_path: Path) -> None:
    settings = {"transport.kind": "tcp", "transport.classes.background.dscp": 8}
    with Cluster(tiny_llama, tmp_path, settings=settings) as c:
        moved: dict[str, int] = {}
        for token_id, (traffic_class, num_tokens) in enumerate(PROMPTS, 5):  # none begins like another: all of it moves
            prompt = [token_id] * num_tokens
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "timings": True}
            if traffic_class is not None:
                body["traffic_class"] = traffic_class
            status, answer = c.post("/v1/completions", body)
            assert status == 200, answer
            timings = answer["timings"]
            assert (timings["transport"], timings["traffic_class"]) == ("tcp", traffic_class or "prefill")
            moved[timings["traffic_class"]] = moved.get(timings["traffic_class"], 0) + timings["kv_bytes"]
        assert len(moved) == 3
        urls = {worker_id: info.http_url for worker_id, info in c.registry().items() if info.role != "gateway"}
        for worker_id, direction in (("prefill-0", "sent"), ("decode-0", "received")):
            assert bytes_by_class(urls[worker_id], direction) == moved
        reported = get(urls["prefill-0"] + "/health")
        assert (reported["status"], reported["reasons"]) == ("ok", [])
        in_use = {"decode-0": {"tcp": "transport.kind is tcp"}}
        assert reported["transports"] == {"usable": ["tcp"], "in_use": in_use, "pool_access": {}}

        def told() -> bool:  # by the next heartbeats
            details = get(c.url + "/health")["details"]
            return all(d["transports"] == {"usable": ["tcp"], "in_use": ["tcp"]} for d in details.values())

        wait_until(told, 5, "the gateway's health says what is in use")
        assert {w: d["url"] for w, d in get(c.url + "/health")["details"].items()} == urls


def test_workers_that_may_fall_back_serve_degraded_and_say_why(tiny_llama: Path, tmp_path: Path) -> None:
    settings = {"transport.kind": "rdma", "transport.allow_fallback": True, "transport.rdma.devices": "no_such_device"}
    with Cluster(tiny_llama, tmp_path, settings=settings) as c:
        status, answer = c.post("/v1/completions", {"prompt": [5] * 40, "max_tokens": 4, "timings": True})
        assert (status, answer["timings"]["transport"]) == (200, "shm")
        told = get(c.url + "/health")
        assert told["status"] == "degraded"
        for role in ("prefill", "decode"):
            assert told["workers"][role] == {"degraded": 1}
            [why] = [r for r in told["reasons"] if r.startswith(f"{role} worker {role}-0: rdma cannot be used here: ")]
            reported = get(told["details"][f"{role}-0"]["url"] + "/health/ready")
            assert (reported["status"], reported["transports"]["usable"]) == ("degraded", ["shm", "tcp"])
            assert why.endswith(reported["reasons"][0])
            log = c[f"{role}-0"].log.read_text()
            assert log.count(reported["reasons"][0]) == 1  # warned once


def test_workers_say_where_the_time_of_sequences_went_and_how_they_fare(tiny_llama: Path, tmp_path: Path) -> None:
    num_tokens, num_new = 100, 6
    settings = {"prefill.chunk_tokens": 32, "kv.num_blocks": 64, "decode.max_local_prefill_tokens": 0}
    with Cluster(tiny_llama, tmp_path, settings=settings) as c:
        urls = {info.role: info.http_url for info in c.registry().values() if info.role != "gateway"}
        for role in ("prefill", "decode"):
            asked = get(urls[role] + "/health")
            assert (asked["status"], asked["ready"], asked["role"]) == ("ok", True, role)
            assert (asked["kv_cache_hit_rate"], asked["gpu_util"]) == (None, None)
            assert asked["transport"] == asked["transports"]["usable"]
        body = {"prompt": [5] * num_tokens, "max_tokens": num_new, "ignore_eos": True}
        for _ in range(2):  # the second finds 6 of its blocks
            status, answer = c.post("/v1/completions", body)
            assert status == 200, answer
        c.wait_until_idle()
        prefill, decode = (figures(urls[role], role, c.name) for role in ("prefill", "decode"))
        hit_rate = get(urls["prefill"] + "/health")["kv_cache_hit_rate"]
        assert hit_rate == 96 / 200
        assert get(urls["prefill"] + "/health")["transport"] == ["shm"]
    for found in (prefill, decode):
        assert found["distserve_bus_connected"] == 1
        assert found["distserve_bus_permission_denials_total"] == 0
        blocks = [found["distserve_worker_blocks", state] for state in ("free", "cached", "used")]
        assert sum(blocks) == found["distserve_worker_total_blocks"] == 63
        assert blocks[1] > 0
        assert blocks[2] == 0
        assert not any("gpu" in key[0] for key in found if isinstance(key, tuple))
    assert decode["distserve_worker_sequences_total", "finished"] == 2
    assert prefill["distserve_worker_sequences_total", "handed_over"] == 2
    assert prefill["distserve_worker_handoff_seconds_count", "shm"] == 2
    assert prefill["distserve_worker_queue_seconds_count"] == prefill["distserve_worker_prefill_seconds_count"] == 2
    assert prefill["distserve_worker_pass_seconds_count", "prefill"] == 4 + 1
    assert prefill["distserve_worker_batch_tokens_sum", "prefill"] == 100 + 4
    assert decode["distserve_worker_decode_seconds_count"] == 2
    assert decode["distserve_worker_pass_seconds_count", "decode"] == 2 * (num_new - 1)
    assert decode["distserve_worker_batch_sequences_sum", "decode"] == 2 * (num_new - 1)
    for name in ("queue", "prefill", "handoff", "decode"):
        told = prefill if name != "decode" else decode
        assert 0 < sum(v for k, v in told.items() if f"worker_{name}_seconds_sum" in str(k)) < 60


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as r:
        return json.load(r)


def figures(url: str, role: str, model: str) -> dict[str | tuple[str, ...], float]:
    """Name, with the values of labels that are not the worker's own -> value."""
    with urllib.request.urlopen(url + "/metrics", timeout=5) as r:
        families = list(text_string_to_metric_families(r.read().decode()))
    found: dict[str | tuple[str, ...], float] = {}
    for sample in (s for family in families for s in family.samples):
        if sample.name == "distserve_build_info":
            assert sample.labels == {"version": __version__, "role": role}
        if sample.name.startswith(("distserve_worker", "distserve_bus")):
            assert (sample.labels["role"], sample.labels["model"]) == (role, model)
        own = [value for name, value in sample.labels.items() if name not in ("role", "model")]
        found[(sample.name, *own) if own else sample.name] = sample.value
    assert ("distserve_build_info", __version__) in found
    return found


def bytes_by_class(url: str, direction: str) -> dict[str, int]:
    with urllib.request.urlopen(url + "/metrics", timeout=5) as r:
        families = text_string_to_metric_families(r.read().decode())
    found: dict[str, int] = {}
    for sample in (s for family in families for s in family.samples if s.name == "distserve_transfer_bytes_total"):
        assert (sample.labels["direction"], sample.labels["transport"]) == (direction, "tcp")
        found[sample.labels["traffic_class"]] = found.get(sample.labels["traffic_class"], 0) + int(sample.value)
    return found
