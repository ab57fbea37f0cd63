"""A gateway's process: its audit file, and an exposition that Prometheus's own checker takes."""

import asyncio
import json
import shutil
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from distserve.bus.embedded import EmbeddedNats
from distserve.bus.nats import NatsBus
from distserve.status import Second
from tests.integration.gateway.test_process import free_port, model_folder
from tests.unit.gateway.measured import samples
from tests.unit.gateway.scripted import MODEL, Cluster, says
from tests.waiting import until

TEXT = "one two three"
REFUSED_CONFIG = 78


@asynccontextmanager
async def gateway(nats_url: str, folder: Path, **telemetry: Any) -> AsyncIterator[tuple[Process, str]]:
    port = free_port()
    settings = {
        "model": {"path": str(model_folder(folder / "model")), "name": MODEL},
        "gateway": {"port": port, "id": "gw"},
        "bus": {"url": nats_url},
        "telemetry": telemetry,
    }
    config = folder / "distserve.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "distserve.cli", "gateway", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.communicate(), 20)


@asynccontextmanager
async def workers(nats_url: str) -> AsyncIterator[Cluster]:
    async def connect(name: str) -> NatsBus:
        return await NatsBus.connect(nats_url, name=name)

    cluster = Cluster(connect)
    try:
        await cluster.add("decode", "d0", says(TEXT))
        await cluster.add("prefill", "p0", says(TEXT))
        yield cluster
    finally:
        await cluster.close()


async def ready(client: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if (await client.get("/health/ready")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError("the gateway is not ready")


def seconds(path: Path) -> list[Second]:
    return [msgspec.json.decode(line, type=Second) for line in path.read_bytes().splitlines()]


async def test_the_audit_file_has_a_line_for_every_second_and_survives_rotation(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    async with (
        workers(nats_server.url),
        gateway(nats_server.url, tmp_path, audit_file=str(path)) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        await ready(client)
        for _ in range(3):
            assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 9})).status_code == 200
        await until(lambda: sum(second.num_ended for second in seconds(path)) == 3)
        await until(lambda: len(seconds(path)) >= 3, what="seconds without traffic")
        path.rename(old)
        await until(lambda: path.exists() and len(seconds(path)) >= 2)
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 9})).status_code == 200
        process.terminate()
        await asyncio.wait_for(process.wait(), 20)
    found = seconds(old) + seconds(path)
    times = [second.at_unix_s for second in found]
    assert times == [times[0] + i for i in range(len(times))], "every second once"
    assert all(at == int(at) for at in times)
    with_tokens = [second for second in found if second.num_first_tokens]
    assert sum(second.num_first_tokens for second in with_tokens) == 4, "the last second is told, though cut short"
    for second in with_tokens:
        quantiles = (second.ttft_p50_s, second.ttft_p90_s, second.ttft_p99_s, second.ttft_max_s)
        assert None not in quantiles
        assert list(quantiles) == sorted(quantiles)  # type: ignore[type-var]


async def test_an_audit_file_that_cant_be_written_refuses_the_start(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing" / "audit.jsonl")
    async with gateway(nats_server.url, tmp_path, audit_file=missing) as (process, _):
        _, log = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == REFUSED_CONFIG
    assert f"telemetry.audit_file is '{missing}'" in log.decode()


async def test_prometheus_takes_what_is_exposed(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    async with (
        workers(nats_server.url),
        gateway(nats_server.url, tmp_path, vllm_metric_names=True) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        await ready(client)
        fields = {"prompt": "a", "max_tokens": 9, "ttft_slo_ms": 30_000, "priority": "vip"}
        assert (await client.post("/v1/completions", json=fields)).status_code == 200
        assert (await client.post("/v1/completions", json=fields | {"top_p": 7})).status_code == 400
        text = (await client.get("/metrics")).text
    found = samples(text)
    assert found["distserve_gateway_slo_requests_total{attained=yes,priority=vip}"] == 1
    assert found["distserve_bus_connected"] == 1
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not here: only the client library has parsed it")
    check = await asyncio.create_subprocess_exec(
        promtool,
        "check",
        "metrics",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(check.communicate(text.encode()), 30)
    complaints = [line for line in said.decode().splitlines() if not line.startswith("vllm:")]
    assert not complaints, "vLLM's names have a colon, which its checker does not like"


async def test_a_lost_bus_is_seen_in_health_and_metrics_and_so_is_its_return(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    async def told(client: httpx.AsyncClient) -> tuple[int, str, bool]:
        answer = await client.get("/health")
        return answer.status_code, answer.json()["status"], answer.json()["ready"]

    async def becomes(client: httpx.AsyncClient, wanted: tuple[int, str, bool]) -> None:
        deadline = time.monotonic() + 20
        while (found := await told(client)) != wanted:
            assert time.monotonic() < deadline, f"{found}, not {wanted}"
            await asyncio.sleep(0.05)

    async with (
        gateway(nats_server.url, tmp_path) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=20) as client,
        workers(nats_server.url),
    ):
        await ready(client)
        await becomes(client, (200, "ok", True))
        port = nats_server.port
        nats_server.kill()
        await becomes(client, (503, "degraded", False))
        assert (await client.get("/health/live")).status_code == 200
        found = samples((await client.get("/metrics")).text)
        assert (found["distserve_bus_connected"], found["distserve_bus_reconnects_total"]) == (0, 0)
        with EmbeddedNats(port=port):
            await becomes(client, (200, "ok", True))
            found = samples((await client.get("/metrics")).text)
            assert (found["distserve_bus_connected"], found["distserve_bus_reconnects_total"]) == (1, 1)
