"""Two deployments of real processes, one the other's fallback: tokens across the seam, and what happens when the first
one's workers are gone."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, wait_until
from tests.reference import Reference
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NUM_TOKENS = 20
LENGTHS = (1, 15, 16, 17, 63, 200, 513)


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    """(a deployment, its fallback), of one model."""
    with Cluster(tiny_llama, tmp_path_factory.mktemp("fallback")) as fallback:
        settings = {"breaker.fallback_url": fallback.url, "breaker.for_s": 1, "breaker.open_s": 600}
        settings["breaker.ttft_p99_ms"] = 60_000  # so that only a first token that never comes is late
        with Cluster(tiny_llama, tmp_path_factory.mktemp("first"), settings=settings) as first:
            yield first, fallback


async def ask(cluster: Cluster, bodies: list[dict[str, Any]], header: str) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        headers = {"X-First-Token": header} if header else {}
        return list(await asyncio.gather(*(client.post("/v1/completions", json=b, headers=headers) for b in bodies)))


def body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True} | fields


def test_tokens_are_the_same_with_a_seam_as_without(pair: tuple[Cluster, Cluster], reference: Reference) -> None:
    first, fallback = pair
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]
    for fields in ({"temperature": 0}, {"temperature": 1.0, "seed": 7}):
        bodies = [body(prompt, **fields) for prompt in prompts]
        here = asyncio.run(ask(first, bodies, "false"))
        both = asyncio.run(ask(first, bodies, "true"))
        for prompt, one, other in zip(prompts, here, both, strict=True):
            assert other.headers["x-served-by"] == "distserve, fallback", other.text
            want, got = one.json()["choices"][0], other.json()["choices"][0]
            assert got["token_ids"] == want["token_ids"], reference.explain(prompt, want["token_ids"], got["token_ids"])
            assert got["text"] == want["text"]
            assert other.json()["usage"]["completion_tokens"] == NUM_TOKENS
            if fields["temperature"] == 0:
                expected = reference.greedy(prompt, NUM_TOKENS)
                assert got["token_ids"] == expected, reference.explain(prompt, expected, got["token_ids"])
    first.wait_until_idle()
    fallback.wait_until_idle()


def test_without_workers_the_fallback_serves(pair: tuple[Cluster, Cluster]) -> None:
    first, _ = pair
    request = body([5, 6, 7], temperature=0)
    [before] = asyncio.run(ask(first, [request], ""))
    assert "x-served-by" not in before.headers
    for name in ("prefill-0", "decode-0"):
        first[name].kill()

    def falls_back() -> bool:
        [answer] = asyncio.run(ask(first, [request], ""))
        return answer.headers.get("x-served-by") == "fallback"

    wait_until(falls_back, 20, "requests go to the fallback")
    [after] = asyncio.run(ask(first, [request], ""))
    assert after.json()["choices"] == before.json()["choices"]
