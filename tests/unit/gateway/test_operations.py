"""Health, metrics, the registry entry, draining, and what the process may import."""

import asyncio
import subprocess
import sys

from prometheus_client.parser import text_string_to_metric_families

import distserve
from tests.unit.gateway.scripted import TOKENIZER, Cluster, memory_cluster, says, serving
from tests.waiting import until

BODY = {"prompt": "a", "max_tokens": 50}


async def samples(cluster: Cluster) -> dict[str, float]:
    async with cluster.client() as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model", "le"))
            if not sample.name.endswith("_bucket"):
                found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


async def test_health_tells_why_it_is_not_ready() -> None:
    cluster = memory_cluster()
    try:
        await cluster.start_gateway()
        async with cluster.client() as client:
            response = await client.get("/health")
            assert response.status_code == 503
            assert (response.json()["status"], response.json()["ready"]) == ("warming", False)
            assert any("decode" in reason for reason in response.json()["reasons"])
            assert (await client.get("/health/ready")).status_code == 503
            live = await client.get("/health/live")
            assert (live.status_code, live.json()) == (200, response.json())
            await cluster.add("decode", "d0", says("x"))
            await cluster.see("d0")
            response = await client.get("/health/ready")
            assert (response.status_code, response.json()["status"]) == (200, "degraded")
            assert response.json()["reasons"] == ["no prefill worker for model 'tiny' is ready: decode prefills itself"]
            await cluster.add("prefill", "p0", says("x"))
            await cluster.see("p0", "d0", "gw")
            response = await client.get("/health")
            assert response.status_code == 200
            assert response.json() == {
                "status": "ok",
                "ready": True,
                "reasons": [],
                "role": "gateway",
                "model": "tiny",
                "version": distserve.__version__,
                "gpu_util": None,
                "kv_cache_hit_rate": None,
                "transport": ["shm"],
                "workers": {"prefill": {"ok": 1}, "decode": {"ok": 1}, "gateway": {"ok": 1}},
                "details": {
                    worker: {
                        "role": role,
                        "status": "ok",
                        "transports": {"usable": ["shm", "tcp"], "in_use": ["shm"]},
                        "url": f"http://127.0.0.1/{worker}",
                    }
                    for role, worker in (("prefill", "p0"), ("decode", "d0"))
                },
            }
            for reasons, said in ((["its disk is full"], "its disk is full"), ([], "degraded")):
                cluster.workers["d0"].status, cluster.workers["d0"].reasons = "degraded", reasons
                await cluster.gateway.watch.wait_for(
                    lambda seen, reasons=reasons: seen["d0"].status == "degraded" and seen["d0"].reasons == reasons, 5.0
                )
                response = await client.get("/health/ready")
                assert (response.status_code, response.json()["status"]) == (200, "degraded")
                assert response.json()["workers"]["decode"] == {"degraded": 1}
                assert response.json()["reasons"] == [f"decode worker d0: {said}"]
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            cluster.gateway_bus.hub.cut(cluster.gateway_bus)
            response = await client.get("/health/ready")
            told = response.json()
            assert (response.status_code, told["status"], told["ready"]) == (503, "degraded", False), "it was ready"
            assert "not connected to the bus" in told["reasons"]
            assert told["kv_cache_hit_rate"] == 0.0, "prompts were computed, none of them found"
    finally:
        await cluster.close()


async def test_metrics_count_requests_tokens_and_times() -> None:
    async with serving(says("one two three")) as cluster:
        num_tokens = len(TOKENIZER.encode("one two three", add_special_tokens=False)) + 1
        async with cluster.client() as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            assert (await client.post("/v1/completions", json=BODY | {"stream": True})).status_code == 200
            assert (await client.post("/v1/completions", json=BODY | {"top_p": 7})).status_code == 400
        found = await samples(cluster)
        assert found["distserve_gateway_requests_total{kind=completion,outcome=ok}"] == 2
        assert found["distserve_gateway_requests_total{kind=completion,outcome=invalid_request}"] == 1
        assert found["distserve_gateway_output_tokens_total{}"] == 2 * num_tokens
        assert found["distserve_gateway_prompt_tokens_total{}"] == 2 * len(
            TOKENIZER.encode("a", add_special_tokens=True)
        )
        assert found["distserve_gateway_ttft_seconds_count{}"] == 2
        assert found["distserve_gateway_itl_seconds_count{}"] == 2 * (num_tokens - 1)
        assert found["distserve_gateway_e2e_seconds_count{}"] == 2
        assert found["distserve_gateway_live_sequences{}"] == 0


async def test_the_gateway_is_in_the_registry_and_leaves_it() -> None:
    async with serving(says("x")) as cluster:
        await cluster.see("gw")
        info = cluster.gateway.watch.snapshot["gw"]
        assert (info.role, info.model, info.status) == ("gateway", "tiny", "ok")
        watcher = await cluster._stack.enter_async_context(await cluster._connect("watcher"))
        async with watcher.registry().watch() as watch:
            assert "gw" in watch.snapshot
            await cluster.gateway.__aexit__(None, None, None)
            await watch.wait_for(lambda snapshot: "gw" not in snapshot, 1.0)  # long before it would expire


async def test_draining_lets_streams_finish_and_takes_nothing_new() -> None:
    async with serving(says("one two three four")) as cluster, cluster.client() as client:
        cluster.workers["d0"].gate_at = 3
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        draining = asyncio.create_task(cluster.gateway.drain(5.0))
        await cluster.gateway.watch.wait_for(
            lambda snapshot: snapshot["gw"].status == "draining" if "gw" in snapshot else False, 2.0
        )
        refused = await client.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        cluster.workers["d0"].gate.set()
        assert (await running).json()["choices"][0]["text"] == "one two three four"
        assert await draining is True


async def test_what_does_not_finish_in_the_grace_time_ends_with_an_error_event() -> None:
    async with serving(says("one two three four")) as cluster, cluster.client() as client:
        cluster.workers["d0"].gate_at = 3
        running = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": True}))
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        assert await cluster.gateway.drain(0.1) is False
        events = (await running).text.strip().split("\n\n")
        assert '"code":"draining"' in events[-1]
        await until(lambda: bool(cluster.workers["d0"].cancelled))


async def test_openapi_describes_the_bodies() -> None:
    async with serving(says("x")) as cluster, cluster.client() as client:
        document = (await client.get("/openapi.json")).json()
        body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = document["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]
        assert {"messages", "temperature", "stream_options", "timings"} <= schema["properties"].keys()
        assert (await client.get("/docs")).status_code == 200


def test_the_process_has_no_torch_transformers_or_numpy() -> None:
    code = (
        "import sys, distserve_gateway.main\n"
        "print(*(m for m in ('torch', 'transformers', 'numpy') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
