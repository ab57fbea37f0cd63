"""`distserve bench` against real clusters: what it measures is what the gateway measured, and what failed is seen."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from distserve.bench.answers import THROTTLED
from distserve.bench.document import Document
from distserve.bench.options import Raw, check
from distserve.bench.run import run
from tests.cluster import Cluster
from tests.waiting import until

pytestmark = pytest.mark.e2e


async def measured(cluster: Cluster, **given: Any) -> Document:
    defaults: dict[str, Any] = {"floor": False, "input": "48", "output": "8", "warmup": "2"}
    async with asyncio.timeout(90):
        return await run(check(Raw(**{"url": cluster.url} | defaults | given)), lambda line: None)


def metric(cluster: Cluster, name: str) -> float:
    """The sum of a metric's samples on the gateway."""
    with urllib.request.urlopen(cluster.url + "/metrics", timeout=5) as r:
        lines = r.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_lengths_are_exact_and_tokens_counted_by_usage(cluster: Cluster, endpoint: str) -> None:
    lengths = {"input": "uniform:min=40,max=90", "output": "uniform:min=2,max=12"}
    document = await measured(cluster, concurrency=2, requests=12, endpoint=endpoint, **lengths)
    side = document.sides[0]
    assert side.summary.num_ok == 12, side.summary.failures
    assert side.server.dropped == []
    assert "/tokenize" in side.server.lengths_by
    assert side.summary.num_input_as_asked == side.summary.num_output_as_asked == 12
    assert side.summary.counted == {"usage": 12}
    assert side.server.facts["/health"]["model"] == cluster.name
    assert side.server.facts["model"]["max_model_len"] == 2048


async def test_lengths_are_exact_by_a_tokenizers_folder_too(cluster: Cluster, tiny_llama: Path) -> None:
    document = await measured(cluster, concurrency=1, requests=4, tokenizer=tiny_llama)
    side = document.sides[0]
    assert str(tiny_llama) in side.server.lengths_by
    assert side.summary.num_input_as_asked == 4


async def test_times_to_first_token_are_the_gateways_and_a_little_more(cluster: Cluster) -> None:
    name = "distserve_gateway_ttft_seconds"
    count, total = metric(cluster, name + "_count"), metric(cluster, name + "_sum")
    document = await measured(cluster, rate=15.0, requests=30, warmup="0")
    count, total = metric(cluster, name + "_count") - count, metric(cluster, name + "_sum") - total
    ttfts = [r.ttft_s(from_sent=True) or 0.0 for r in document.results]
    assert count == 31  # the probe, too
    assert all(r.ok for r in document.results)
    # The gateway's clock starts when the request has come and stops before the token leaves; the probe's part is small.
    gateways_mean, mine = total / count, sum(ttfts) / len(ttfts)
    assert 0.5 * gateways_mean < mine < gateways_mean + 0.25


async def test_a_promise_that_can_not_be_kept_is_refused_and_counted_apart(tiny_llama: Path, tmp_path: Path) -> None:
    with Cluster(tiny_llama, tmp_path) as c:
        await measured(c, concurrency=2, requests=8, input="900")  # speeds are learnt by work
        document = await measured(c, rate=40.0, requests=40, input="900", promise="ttft=1ms", warmup="0", seed=3)
    summary = document.sides[0].summary
    assert summary.num_throttled > 20, summary.failures
    assert set(summary.failures) <= {THROTTLED}
    assert summary.num_throttled == summary.failures[THROTTLED].num
    assert summary.good_share is not None
    assert summary.good_share < 0.2


async def test_a_worker_that_is_killed_in_mid_run_shows_as_failures_of_its_time(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with Cluster(tiny_llama, tmp_path, decode=[{}, {}]) as c:
        task = asyncio.create_task(measured(c, concurrency=4, duration="6s", output="150", warmup="0", deadline="20s"))
        await until(lambda: task.done() or metric(c, "distserve_gateway_ttft_seconds_count") > 10, 30)
        assert not task.done()
        c["decode-0"].kill()
        document = await task
    summary = document.sides[0].summary
    assert summary.num_ok > 0
    assert summary.num_requests == summary.num_ok + sum(f.num for f in summary.failures.values())
    lost = [r for r in document.results if not r.ok and r.times_s]
    for r in lost:
        assert r.kind == "error event", r
        assert 0 < len(r.times_s) < 150
    last = max(r.due_s for r in document.results if r.ok)
    assert last > 4.0  # the other worker went on


def test_the_command_on_a_cluster_writes_its_report(cluster: Cluster, tmp_path: Path) -> None:
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    options = ["--rate", "10", "--requests", "20", "--input", "48", "--output", "8", "--slo", "ttft=5s"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "distserve.cli",
            "bench",
            cluster.url,
            *options,
            "--html",
            str(page),
            "--json",
            str(data),
        ],
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "20 of 20 requests ended well" in done.stdout
    document = json.loads(data.read_text())
    assert len(document["results"]) >= 20
    assert document["client"]["floor"]["events_per_s"] > 1000
    assert page.read_text().count("<svg") == 3
