"""A node's `/metrics` and `/health`, and `distserve kv` on a node that runs and on its folder."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from distserve.bus.embedded import EmbeddedNats
from distserve.messages import PinRequest
from tests.integration.kvstore.bare_client import bare_client, chain_of, run_of
from tests.integration.kvstore.nodes import BLOCK, config_of, running
from tests.waiting import until


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
        return text


async def kv(*words: str, url: str = "", rc: int = 0) -> list[dict[str, Any]]:
    """`distserve kv … --json`."""
    options = ["--nats-url", url] if url else []
    command = [sys.executable, "-m", "distserve.cli", "kv", *words, "--json", *options]
    env = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_")}
    env |= {"DISTSERVE_BUS_TTL_S": "1.0", "DISTSERVE_BUS_BEAT_S": "0.2"}  # the registry's, for which there is one
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False, env=env
    )
    assert done.returncode == rc, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


async def test_metrics_and_health_say_what_is_where(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    config = config_of(nats_server.url, tmp_path)
    async with bare_client(nats_server.url) as client, running(config) as node:
        runs = [run_of(chain_of(20))]
        await client.offer(node.node_id, runs, range(20), conversation="c")
        found = await client.lookup(node.node_id, runs)
        await client.fetch(node.node_id, runs, range(client.half, client.half + 20), pin_id=found.pin_id)
        await until(lambda: node.num_dirty() == 0)
        async with client.bus.registry().watch() as watch:
            base = watch.snapshot[node.node_id].http_url
        text = await asyncio.to_thread(get, f"{base}/metrics")
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        values = {(s.name, *sorted(s.labels.values())): s.value for s in samples}
        assert values["distserve_kvstore_bytes", "dram"] == 20 * BLOCK
        assert values["distserve_kvstore_blocks", "disk"] == 20
        assert values["distserve_kvstore_hit_blocks_total", "dram"] == 20
        assert values["distserve_kvstore_operation_seconds_count", "disk", "write"] >= 1
        assert values["distserve_kvstore_operation_seconds_count", "", "fetch"] == 1
        assert values["distserve_kvstore_index_blocks",] == 20
        assert values["distserve_kvstore_degraded",] == 0
        health = json.loads(await asyncio.to_thread(get, f"{base}/health"))
        assert (health["status"], health["role"]) == ("ok", "kvstore")


async def test_kv_looks_into_a_node_that_runs_and_into_the_folder_it_left(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    config = config_of(nats_server.url, tmp_path)
    async with bare_client(nats_server.url) as client:
        async with running(config) as node:
            await client.offer(node.node_id, [run_of(chain_of(20))], range(20), conversation="talk")
            await client.offer(node.node_id, [run_of(chain_of(10, 1))], range(10), conversation="chat", tenant="t")
            await client.ask(node.node_id, PinRequest(tenant="t", conversation="chat"))
            await until(lambda: node.num_dirty() == 0)
            (stat,) = await kv("stat", url=nats_server.url)
            assert (stat["node"], stat["num_blocks"], stat["tiers"]["disk"]["num_blocks"]) == (node.node_id, 30, 30)
            listed = await kv("ls", url=nats_server.url)
            assert [(row["conversation"], row["num_blocks"]) for row in listed] == [("chat", 10), ("talk", 20)]
            assert listed[0]["pinned_s"] > 3000
            verified = {"num_good": 30, "num_damaged": 0, "num_unreadable": 0}
            assert await kv("verify", url=nats_server.url) == [{"node": node.node_id, **verified}]
            assert (await kv("prune", "--keep-blocks", "25", url=nats_server.url))[0]["num_evicted"] == 5
            assert (await kv("stat", str(tmp_path), rc=78)) == []  # a node is on it
        (stat,) = await kv("stat", str(tmp_path))
        assert stat["num_blocks"] == 30  # the clean stop has written what was in memory still
        assert {row["conversation"] for row in await kv("ls", str(tmp_path))} == {"chat", "talk"}
        assert (await kv("verify", str(tmp_path)))[0] == verified
        assert (await kv("prune", str(tmp_path), "--keep-blocks", "5"))[0]["num_left"] == 5
    await kv("stat", url=nats_server.url, rc=1)  # no node any more
