"""Real workers say over HTTP what they moved, by which transport and class, and the gateway says where to ask."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

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


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as r:
        return json.load(r)


def bytes_by_class(url: str, direction: str) -> dict[str, int]:
    with urllib.request.urlopen(url + "/metrics", timeout=5) as r:
        families = text_string_to_metric_families(r.read().decode())
    found: dict[str, int] = {}
    for sample in (s for family in families for s in family.samples if s.name == "distserve_transfer_bytes_total"):
        assert (sample.labels["direction"], sample.labels["transport"]) == (direction, "tcp")
        found[sample.labels["traffic_class"]] = found.get(sample.labels["traffic_class"], 0) + int(sample.value)
    return found
