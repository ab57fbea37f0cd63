"""What a gateway's figures say of requests that the fallback server answers, or fails to."""

from typing import Any

import httpx

from distserve.errors import Overloaded
from tests.integration.gateway.with_fallback import (
    OwnServer,
    client_of,
    event,
    fallen_back,
    falling_back,
    head,
    open_breaker,
    over_http,
    says_bytes,
)
from tests.unit.gateway.measured import measured
from tests.unit.gateway.scripted import Cluster, says

TEXT = "one two three"
BODY: dict[str, Any] = {"prompt": "hello to you", "max_tokens": 50}
ALL_HERE = {"X-First-Token": "false"}


async def post(client: httpx.AsyncClient, **options: Any) -> int:
    return (await client.post("/v1/completions", json=BODY, **options)).status_code


async def test_what_a_fallback_server_says_of_a_request_is_shown_to_its_client_alone() -> None:
    said = b'data: {"error": {"message": "\'hello to you\' is a secret word"}}\n\n'
    other = OwnServer(says_bytes(head(), event("one"), said))
    async with other.serving() as other_url, fallen_back(says(TEXT), other_url) as (cluster, url):
        async with client_of(url) as client:
            response = await client.post("/v1/completions", json=BODY)
            assert (response.status_code, "a secret word" in response.text) == (503, True)
            shown = (await client.get("/status")).json()["troubles"]
    assert [trouble["code"] for trouble in shown] == ["unavailable"]
    assert shown[0]["message"].endswith(": the fallback server " + other_url.removeprefix("http://") + " failed")
    assert cluster.gateway.metrics.num_failed == 1


async def test_prompts_that_nobody_here_looked_up_do_not_dilute_the_share_of_those_found() -> None:
    async with over_http(says(TEXT)) as (other, other_url):
        other.workers["p0"].num_cached = lambda request: 2
        options: Any = {"breaker": falling_back(other_url), "vllm_metric_names": True, "submit_timeout_s": 0.2}
        async with over_http(says(TEXT), **options) as (cluster, url), client_of(url) as client:
            p0 = cluster.workers["p0"]
            p0.num_cached = lambda request: 1
            assert await post(client) == 200
            num_tokens = len(p0.submitted[0].token_ids)
            p0.refusal = Overloaded("full")
            for _ in range(3):
                assert await post(client) == 503
            p0.refusal = None
            open_breaker(cluster)
            assert await post(client) == 200
            assert len(other.workers["p0"].submitted) == 1
            assert hit_rate(cluster) == 1 / num_tokens
            found = measured(cluster)
            # All prompts are counted, and those apart that workers here looked up.
            assert found["distserve_gateway_prompt_tokens_total"] == 5 * num_tokens
            assert found["distserve_gateway_looked_up_tokens_total"] == num_tokens
            assert found["distserve_gateway_cached_tokens_total"] == 1
            assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"] == num_tokens
            assert found["vllm:prefix_cache_hits_total"] == 1
            assert await post(client, headers=ALL_HERE) == 200
            assert measured(cluster)["distserve_gateway_looked_up_tokens_total"] == 2 * num_tokens


def hit_rate(cluster: Cluster) -> float:
    _, report = cluster.gateway.health()
    rate: float = report["kv_cache_hit_rate"]
    return rate
