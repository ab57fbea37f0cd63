"""`distserve monitor` on a real cluster: the figures are those of what was asked."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, wait_until

pytestmark = pytest.mark.e2e

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def busy(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with a store node, after three requests of two prompts, two of them promised."""
    with Cluster(tiny_llama, tmp_path_factory.mktemp("monitor"), kvstore=[{}]) as c:
        monitor(c, "--once", "--json")  # from here on somebody looks
        for i, token_id in enumerate((5, 6, 5)):
            body: dict[str, Any] = {"prompt": [token_id] * 64, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            body |= {"ttft_slo_ms": 30_000, "priority": "vip"} if i else {}
            assert c.post("/v1/completions", body)[0] == 200
        num_gaps = 3 * (NUM_TOKENS - 1)
        wait_until(lambda: status_of(c)["gateway"]["itl"]["count"] == num_gaps, 10, "their seconds are full")
        yield c


def monitor(c: Cluster, *args: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_")} | {"COLUMNS": "140"}
    return subprocess.run(
        [sys.executable, "-m", "distserve.cli", "monitor", "--url", c.url, *args],
        capture_output=True,
        text=True,
        timeout=30,
        env=env,
        check=False,
    )


def status_of(c: Cluster) -> dict[str, Any]:
    done = monitor(c, "--json", "--once")
    assert (done.returncode, done.stderr) == (0, "")
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def test_json_is_what_happened(busy: Cluster) -> None:
    status = status_of(busy)
    assert status["model"] == "tiny"
    assert {s["id"] for s in status["services"]} == {"gateway-0", "prefill-0", "decode-0", "kvstore-0"}
    assert status["gateway"]["ttft"]["count"] == 3
    assert status["gateway"]["itl"]["count"] == 3 * (NUM_TOKENS - 1)
    assert status["gateway"]["classes"]["vip"]["num_attained"] == 2
    assert sum(second["num_tokens"] for second in status["history"]) == 3 * NUM_TOKENS


def test_the_picture_has_all_of_it(busy: Cluster) -> None:
    done = monitor(busy, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "tiny  gateway-0",
        "TTFT",
        "prefill-0  prefill  ok",
        "decode-0   decode   ok",
        "kvstore-0",
        "dram",
        "disk",
    ):
        assert words in done.stdout
    [vip] = [line.split() for line in done.stdout.splitlines() if line.startswith("vip ")]
    assert vip == ["vip", "2", "2", "2", "100", "%", "0"]


def test_one_figure_is_the_same_by_either_name(busy: Cluster) -> None:
    by_path = monitor(busy, "--metric", "services.decode-0.total_blocks", "--once")
    by_name = monitor(busy, "--metric", 'distserve_worker_total_blocks{service="decode-0"}', "--once")
    assert by_path.returncode == by_name.returncode == 0, by_path.stderr + by_name.stderr
    assert float(by_path.stdout.split()[1]) == float(by_name.stdout.split()[1]) > 0
    found = monitor(busy, "--metric", "distserve_worker_total_blocks", "--once")
    assert found.returncode == 2
    assert 'service="decode-0"' in " ".join(found.stderr.split())


def test_a_worker_that_dies_is_missed(busy: Cluster) -> None:
    """The last one: it leaves the module's cluster without a store."""
    busy["kvstore-0"].kill()

    def gone() -> bool:
        return "kvstore-0  kvstore  ok" not in monitor(busy, "--once").stdout

    wait_until(gone, 20, "the picture shows that the node is gone")
