"""GET /status and GET /metrics/cluster of a real cluster: processes, nats-server, a tiny model."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from distserve.status import ClassStatus, ClusterStatus, ServiceStatus
from tests.cluster import Cluster, Service, wait_until
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.e2e

WORKERS = {"prefill-0": "prefill", "decode-0": "decode", "kvstore-0": "kvstore", "gateway-0": "gateway"}
PROMPT = "In the beginning there was a block of keys and values. " * 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("status")
    model = make_tiny("llama", folder / "model")
    settings = {"transport.kind": "tcp", "decode.max_local_prefill_tokens": 0, "kvstore.min_fetch_blocks": 1}
    with Cluster(model, folder / "run", kvstore=[{}], settings=settings) as cluster:
        yield cluster


def get(cluster: Cluster, path: str) -> str:
    with urllib.request.urlopen(cluster.url + path, timeout=10) as response:
        assert response.status == 200
        return str(response.read().decode())


def status(cluster: Cluster) -> ClusterStatus:
    return msgspec.json.decode(get(cluster, "/status"), type=ClusterStatus, strict=True)


def service(cluster: Cluster, worker_id: str) -> ServiceStatus:
    return next(s for s in status(cluster).services if s.id == worker_id)


def shown(cluster: Cluster, condition: Callable[[ClusterStatus], bool], what: str, timeout_s: float = 15.0) -> None:
    wait_until(lambda: condition(status(cluster)), timeout_s, what)


def complete(cluster: Cluster, prompt: str = PROMPT, num: int = 1) -> None:
    for i in range(num):
        code, answer = cluster.post("/v1/completions", {"prompt": f"{i} {prompt}", "max_tokens": 24})
        assert code == 200, answer


def test_every_service_is_reached_and_tells_its_figures(cluster: Cluster) -> None:
    first = status(cluster)
    assert {s.id: s.role for s in first.services} == WORKERS
    assert all(s.reached and s.status == "ok" for s in first.services)
    assert first.model == "tiny"
    for worker_id in ("prefill-0", "decode-0"):
        found = service(cluster, worker_id)
        assert found.total_blocks == 2047
        assert found.version == first.version
    assert {t.tier for t in first.tiers} >= {"hbm", "dram", "disk"}
    assert not first.gateway.needs_key


def test_requests_show_in_the_figures_of_the_gateway_the_workers_and_what_flows_between_them(cluster: Cluster) -> None:
    status(cluster)  # what is before
    complete(cluster, num=3)

    def seen(now: ClusterStatus) -> bool:
        by_id = {s.id: s for s in now.services}
        ended = now.gateway.classes.get("normal", ClassStatus()).num_requests  # in seconds that are over
        return (
            min(now.gateway.ttft.count, ended) >= 3 and by_id["prefill-0"].num_prompt_tokens >= 300 and bool(now.flows)
        )

    shown(cluster, seen, "three requests")
    now = status(cluster)
    assert now.interval_s > 0
    assert now.gateway.classes["normal"].num_requests >= 3
    assert now.gateway.ttft.p50 is not None
    assert sum(second.num_started for second in now.history) >= 3
    flow = next(f for f in now.flows if f.traffic_class == "prefill")
    assert (flow.transport, flow.dscp) == ("tcp", 34)
    assert flow.num_bytes > 0
    assert service(cluster, "decode-0").transports_in_use == ["tcp"]
    decode = service(cluster, "decode-0")
    assert decode.step_s is not None
    assert 0 < decode.step_s < 5
    assert decode.mean_batch is not None
    assert decode.mean_batch >= 1


def test_the_merged_exposition_is_valid_and_holds_every_services_own(cluster: Cluster) -> None:
    complete(cluster)
    text = get(cluster, "/metrics/cluster")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = [s for family in families.values() for s in family.samples]
    assert {s.labels["service"]: s.labels["service_role"] for s in samples} == WORKERS
    for name, services in {
        "distserve_worker_free_blocks": {"prefill-0", "decode-0"},
        "distserve_kvstore_blocks": {"kvstore-0"},
        "distserve_gateway_ttft_seconds": {"gateway-0"},
        "distserve_service_reached": set(WORKERS),
    }.items():
        assert {s.labels["service"] for s in families[name].samples} >= services, name
    http_url = cluster.registry()["prefill-0"].http_url
    with urllib.request.urlopen(f"{http_url}/metrics", timeout=5) as response:
        own = {f.name for f in text_string_to_metric_families(response.read().decode()) if f.samples}
    merged = {f.name for f in families.values() if any(s.labels["service"] == "prefill-0" for s in f.samples)}
    assert own - merged == set()
    if shutil.which("promtool") is not None:
        done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, timeout=20)
        assert "error while" not in done.stderr, done.stderr


def test_one_that_hangs_is_shown_as_the_registry_has_it_and_warned_of(cluster: Cluster) -> None:
    status(cluster)
    hanging = cluster["prefill-0"]
    hanging.freeze()
    try:
        shown(
            cluster,
            lambda now: any(s.id == "prefill-0" and not s.reached and s.total_blocks == 2047 for s in now.services),
            "prefill-0 does not answer",
        )
        found = status(cluster)
        silent = [w.message for w in found.warnings if w.rule == "degraded" and "prefill-0" in w.message]
        still_there = any(s.id == "prefill-0" for s in found.services)
        assert silent or not still_there  # its entry may have expired by now
    finally:
        hanging.thaw()
    cluster.wait_for_workers({"prefill-0"})
    shown(cluster, lambda now: any(s.id == "prefill-0" and s.reached for s in now.services), "it is back")


def test_a_worker_that_was_started_anew_has_no_rates_below_zero(cluster: Cluster) -> None:
    complete(cluster, num=2)
    status(cluster)
    cluster["decode-0"].kill()
    anew: Service = cluster.start("decode", "decode-0")

    def advertised() -> bool:
        info = cluster.registry().get("decode-0")
        return info is not None and info.pid == anew.pid and info.status == "ok"

    wait_until(advertised, 60, "the new decode-0 is in the registry")
    wait_until(lambda: cluster.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})[0] == 200, 15, "it answers")
    shown(cluster, lambda now: any(s.id == "decode-0" and s.reached for s in now.services), "decode-0 is back")
    for _ in range(2):
        now = status(cluster)
        rates = [s.tokens_per_s for s in now.services] + [f.bytes_per_s for f in now.flows]
        assert all(rate >= 0 for rate in rates)
        assert all(s.kv_hit_rate is None or 0 <= s.kv_hit_rate <= 1 for s in now.services)


def test_a_second_gateway_is_among_the_services_of_the_first(cluster: Cluster) -> None:
    first = cluster.url
    other = cluster.start_gateway("gateway-1")
    try:
        cluster.url, second = first, cluster.url
        assert second != first
        shown(cluster, lambda now: any(s.id == "gateway-1" and s.reached for s in now.services), "gateway-1 answers")
        assert status(cluster).gateway.id == "gateway-0"
        with urllib.request.urlopen(f"{second}/status", timeout=10) as response:
            assert json.load(response)["gateway"]["id"] == "gateway-1"
        wait_until(lambda: 'service="gateway-1"' in get(cluster, "/metrics/cluster"), 10, "its samples are merged")
    finally:
        cluster.url = first
        assert other.terminate() == 0
        cluster.services.remove(other)


def test_with_api_keys_figures_stay_open_as_metrics_are_and_answers_do_not(cluster: Cluster, tmp_path: Path) -> None:
    digest = "0" * 64
    keys = tmp_path / "keys.yaml"
    keys.write_text(f'- {{name: one, sha256: "{digest}"}}\n')
    first = cluster.url
    keyed = cluster.start_gateway("gateway-2", {"gateway.keys_file": str(keys)})
    try:
        for path in ("/", "/status", "/metrics", "/metrics/cluster"):
            get(cluster, path)
        assert status(cluster).gateway.needs_key
        assert cluster.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 401
    finally:
        cluster.url = first
        assert keyed.terminate() == 0
        cluster.services.remove(keyed)
