"""The breaker opens, holds, probes and closes under real requests, and never breaks a stream that has begun."""

import asyncio
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from distserve.config import BreakerConfig
from distserve.errors import Overloaded, SloUnattainable
from tests.integration.gateway.with_fallback import client_of, falling_back, open_breaker, over_http, streamed_text
from tests.unit.gateway.scripted import Cluster, says
from tests.waiting import until

TEXT, THEIRS = "The capital of France is Paris.", "One two three four five six."
COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 99, "stream": True}


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            if sample.name.startswith("distserve_gateway_breaker_") and not sample.name.endswith("_created"):
                name = sample.name.removeprefix("distserve_gateway_breaker_")
                found[f"{name} {sample.labels.get('to', '')}".strip()] = sample.value
    return found


class Streaming:
    """A stream that has begun when started() returns; its gate holds it in mid-answer."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._begun = asyncio.Event()
        self.headers = httpx.Headers()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> str:
        said = ""
        async with self._client.stream("POST", COMPLETIONS, json=BODY) as response:
            assert response.status_code == 200, await response.aread()
            self.headers = response.headers
            async for part in response.aiter_text():
                self._begun.set()
                said += part
        return streamed_text(said)

    async def started(self) -> "Streaming":
        async with asyncio.timeout(10):
            await self._begun.wait()
        return self

    async def text(self) -> str:
        return await asyncio.wait_for(self._task, 10)


def hold(cluster: Cluster) -> asyncio.Event:
    """Streams that begin from now on stop in mid-answer until the event that is returned is set."""
    worker = cluster.workers["d0"]
    worker.gate_at = 3
    worker.gate = asyncio.Event()
    return worker.gate


async def test_it_opens_holds_probes_and_closes_while_streams_go_on() -> None:
    async with over_http(says(THEIRS)) as (other, there):
        breaker = BreakerConfig(fallback_url=there, ttft_p99_ms=1500, for_s=1, open_s=2, num_probes=2)
        async with over_http(says(TEXT), breaker=breaker) as (cluster, url), client_of(url) as client:
            state = cluster.gateway.trials.breaker

            # Closed: a stream begins, and is held in its middle over all that follows.
            here, away = hold(cluster), hold(other)
            first = await Streaming(client).started()
            assert "x-served-by" not in first.headers
            assert (await client.get("/health")).json()["status"] == "ok"

            # First tokens stay away, and it opens. What waits goes on waiting.
            prefill = cluster.workers["p0"]
            prefill.gate_at = 0
            late = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
            await until(lambda: state.state == "open", what="open")
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "degraded")
            assert any("the breaker is open" in reason for reason in health.json()["reasons"])
            assert (await metrics(client))["state"] == 1

            # Open: new ones go to the fallback; one is held in its middle there.
            second = await Streaming(client).started()
            assert second.headers["x-served-by"] == "fallback"
            prefill.gate_at = None
            prefill.gate.set()

            # Half-open: two are let through, beside them others go on to the fallback.
            await until(lambda: state.state == "half_open", what="half-open")
            prefill.gate_at, prefill.gate = 0, asyncio.Event()
            probes = [asyncio.create_task(client.post(COMPLETIONS, json=BODY)) for _ in range(2)]
            await until(lambda: len(prefill.submitted) == 4, what="both probes at the worker")
            beside = await Streaming(client).started()
            assert beside.headers["x-served-by"] == "fallback"
            prefill.gate.set()
            prefill.gate_at = None
            await until(lambda: state.state == "closed", what="closed")
            after = await Streaming(client).started()
            assert "x-served-by" not in after.headers

            # All that has begun, wherever and whenever, comes to its end.
            here.set()
            away.set()
            assert [await stream.text() for stream in (first, second, beside, after)] == [TEXT, THEIRS, THEIRS, TEXT]
            assert [streamed_text(answer.text) for answer in await asyncio.gather(late, *probes)] == [TEXT] * 3
            assert await metrics(client) | {"ttft_p99_seconds": 0} == {
                "state": 0,
                "ttft_p99_seconds": 0,
                "transitions_total closed": 1,
                "transitions_total half_open": 1,
                "transitions_total open": 1,
                "requests_total here": 3,
                "requests_total probe": 2,
                "requests_total fallback": 2,
                "requests_total both": 0,
                "requests_total shed": 0,
            }
            assert (await client.get("/health")).json()["status"] == "ok"


async def test_a_late_probe_opens_it_again() -> None:
    async with over_http(says(THEIRS)) as (_, there):
        breaker = BreakerConfig(fallback_url=there, ttft_p99_ms=100, for_s=1, open_s=2.5, num_probes=1)
        async with over_http(says(TEXT), breaker=breaker) as (cluster, url), client_of(url) as client:
            state = cluster.gateway.trials.breaker
            cluster.workers["p0"].gate_at = 0
            waiting = [asyncio.create_task(client.post(COMPLETIONS, json=BODY))]
            await until(lambda: state.state == "open")
            await until(lambda: state.state == "half_open")
            waiting.append(asyncio.create_task(client.post(COMPLETIONS, json=BODY)))
            await until(lambda: len(cluster.workers["p0"].submitted) == 2)
            await until(lambda: state.state == "open", what="open again")
            assert (await client.post(COMPLETIONS, json=BODY)).headers["x-served-by"] == "fallback"
            cluster.workers["p0"].gate.set()
            assert {streamed_text(answer.text) for answer in await asyncio.gather(*waiting)} == {TEXT}


async def test_without_workers_the_fallback_takes_over() -> None:
    async with over_http(says(THEIRS)) as (_, there):
        breaker = BreakerConfig(fallback_url=there, for_s=1, open_s=600)
        async with over_http(says(TEXT), breaker=breaker) as (cluster, url), client_of(url) as client:
            for worker in cluster.workers.values():
                worker.status = "draining"
            await cluster.gateway.watch.wait_for(
                lambda seen: all(seen[w].status == "draining" for w in cluster.workers), 5.0
            )
            assert (await client.get("/health/ready")).status_code == 503
            refused = await client.post(COMPLETIONS, json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
            await until(lambda: cluster.gateway.trials.breaker.state == "open")
            assert streamed_text((await client.post(COMPLETIONS, json=BODY)).text) == THEIRS
            ready = await client.get("/health/ready")
            assert (ready.status_code, ready.json()["status"]) == (200, "degraded"), "it serves"
            for words in ("no decode worker", "the breaker is open"):
                assert any(words in reason for reason in ready.json()["reasons"])
            cluster.gateway._admission.draining = True
            assert (await client.get("/health/ready")).status_code == 503


async def test_full_workers_open_it_though_a_promise_ends_each_wait() -> None:
    async with over_http(says(THEIRS)) as (_, there):
        breaker = BreakerConfig(fallback_url=there, ttft_p99_ms=60_000, for_s=1, open_s=600)
        async with over_http(says(TEXT), breaker=breaker) as (cluster, url), client_of(url) as client:
            cluster.workers["p0"].refusal = Overloaded("256 sequences wait here", retry_after_s=1.0)
            refused = await client.post(COMPLETIONS, json=BODY | {"ttft_slo_ms": 300})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "slo_unattainable")
            await until(lambda: cluster.gateway.trials.breaker.state == "open", what="open")
            assert streamed_text((await client.post(COMPLETIONS, json=BODY | {"ttft_slo_ms": 300})).text) == THEIRS


async def test_a_probe_refused_for_its_promise_opens_it_again() -> None:
    async with over_http(says(THEIRS)) as (_, there):
        async with over_http(says(TEXT), breaker=falling_back(there)) as (cluster, url), client_of(url) as client:
            state, p0 = cluster.gateway.trials.breaker, cluster.workers["p0"]
            p0.refusal = SloUnattainable("others wait before it", ttft_s=9.0, slo_s=5.0, retry_after_s=4.0)
            open_breaker(cluster)
            state._since -= state.policy.open_s
            assert state.state == "half_open"
            probe = await client.post(COMPLETIONS, json=BODY | {"ttft_slo_ms": 5000})
            assert (probe.status_code, probe.json()["error"]["code"]) == (429, "slo_unattainable")
            assert state.state == "open"
            assert streamed_text((await client.post(COMPLETIONS, json=BODY | {"ttft_slo_ms": 5000})).text) == THEIRS


async def test_a_deadline_of_its_client_opens_nothing() -> None:
    async with over_http(says(THEIRS)) as (_, there):
        async with over_http(says(TEXT), breaker=falling_back(there)) as (cluster, url), client_of(url) as client:
            cluster.workers["p0"].gate_at = 0
            late = await client.post(COMPLETIONS, json=BODY | {"deadline_ms": 50})
            assert "x-served-by" not in late.headers
            assert "deadline_exceeded" in late.text
            cluster.gateway.trials.second()
            assert cluster.gateway.trials.breaker.state == "closed"


async def test_without_a_fallback_the_classes_are_refused_one_after_the_other() -> None:
    breaker = BreakerConfig(mode="on", ttft_p99_ms=100, for_s=1, open_s=60)
    async with over_http(says(TEXT), breaker=breaker) as (cluster, url), client_of(url) as client:
        cluster.workers["p0"].gate_at = 0
        asked = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
        state = cluster.gateway.trials.breaker
        await until(lambda: state.state == "open")
        refused = await client.post(COMPLETIONS, json=BODY | {"priority": "batch"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "shed")
        assert 0 < int(refused.headers["retry-after"]) <= 60
        kept_here = await client.post(
            COMPLETIONS, json=BODY | {"priority": "batch"}, headers={"X-First-Token": "false"}
        )
        assert (kept_here.status_code, kept_here.json()["error"]["code"]) == (429, "shed")
        await until(lambda: "normal" in state.shed, what="the next class")
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 429
        vip = asyncio.create_task(client.post(COMPLETIONS, json=BODY | {"priority": "vip"}))
        await until(lambda: len(cluster.workers["p0"].submitted) == 2)
        cluster.workers["p0"].gate.set()
        for answer in await asyncio.gather(asked, vip):
            assert streamed_text(answer.text) == TEXT
        assert (await metrics(client))["requests_total shed"] == 3


async def test_by_default_it_never_opens() -> None:
    async with over_http(says(TEXT), breaker=BreakerConfig(ttft_p99_ms=1, for_s=1)) as (cluster, url):
        async with client_of(url) as client:
            cluster.workers["p0"].gate_at = 0
            waiting = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
            trials = cluster.gateway.trials
            await until(lambda: (trials.p99_s or 0) > 1, what="a late second")
            assert trials.breaker.state == "closed"
            assert (await client.get("/health")).json()["status"] == "ok"
            cluster.workers["p0"].gate.set()
            assert streamed_text((await waiting).text) == TEXT
