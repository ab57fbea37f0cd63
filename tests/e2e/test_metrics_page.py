"""docs/metrics.md lists what every service exposes, no more and no less."""

import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.metrics_page import PAGE, Row, exposed, tables

pytestmark = pytest.mark.e2e

EVERY, GATEWAYS, VLLM = "Every service", "Gateways", "Gateways, under vLLM's names"
SHARED, WORKERS, DECODE, NODES = (
    "Workers and store nodes",
    "Prefill and decode workers",
    "Decode workers",
    "Store nodes",
)
GPU = "Workers with a GPU"


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def unlike(service: str, shown: Iterable[Row], listed: Iterable[Row], perhaps: Iterable[Row] = ()) -> list[str]:
    """How a service differs from its tables, in words. Labels are compared where there is a series to see them by; a
    gateway has no `role`."""
    wrong, wanted = [], {row.name: row for row in (*listed, *perhaps)}
    seen = {row.name: row for row in shown}
    for name, row in seen.items():
        there = wanted.get(name)
        if there is None:
            wrong.append(f"{service}, not in its tables: {row}")
            continue
        labels = set(there.labels) - ({"role"} if service == "gateway" and name.startswith("distserve_bus_") else set())
        if (there.kind, there.text) != (row.kind, row.text) or (row.labels and labels != set(row.labels)):
            wrong.append(f"{service}, otherwise in its tables: {row}")
    return wrong + [f"{service} has no {row.name}" for row in listed if row.name not in seen]


def test_the_page_is_what_services_expose(tiny_llama: Path, tmp_path: Path) -> None:
    page = tables(PAGE.read_text())
    settings = {"telemetry.vllm_metric_names": "true"}
    with Cluster(tiny_llama, tmp_path, settings=settings, kvstore=[{}]) as c:
        for _ in range(2):
            status, answer = c.post("/v1/completions", {"prompt": [5] * 100, "max_tokens": 4, "ignore_eos": True})
            assert status == 200, answer
        urls = {info.worker_id: info.http_url for info in c.registry().values()}
        gateway = exposed(get(c.url + "/metrics"))
        prefill, decode, node = (
            exposed(get(urls[f"{role}-0"] + "/metrics")) for role in ("prefill", "decode", "kvstore")
        )
    shared = page[EVERY] + page[SHARED]
    wrong = unlike("gateway", gateway, page[EVERY] + page[GATEWAYS] + page[VLLM])
    wrong += unlike("prefill", prefill, shared + page[WORKERS], page[GPU])
    wrong += unlike("decode", decode, shared + page[WORKERS] + page[DECODE], page[GPU])
    wrong += unlike("kvstore", node, shared + page[NODES], page[GPU])
    assert not wrong, "\n".join(wrong)
