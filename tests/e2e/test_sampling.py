"""The same seed gives the same answer whatever else is running, from one worker or two, drawn in prefill or decode."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster

pytestmark = pytest.mark.e2e

DRAWN = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.01, "seed": 3},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "seed": 4},
    {"temperature": 1.0, "logit_bias": {"40": 3, "41": -100}, "seed": 5, "n": 3},
    {"temperature": 1.0, "min_tokens": 12, "logprobs": 3, "seed": 2**63},
]


def body(i: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": [5 + i, 17, 99, 200 + i, 31] * (3 + 9 * i),
        "max_tokens": 20,
        "return_token_ids": True,
        **DRAWN[i],
        **more,
    }


def alone(c: Cluster) -> list[list[list[int]]]:
    """One request after another."""
    return [tokens_of(c.post("/v1/completions", body(i))[1]) for i in range(len(DRAWN))]


async def in_a_crowd(c: Cluster) -> list[list[list[int]]]:
    """The same while others come and go."""
    async with httpx.AsyncClient(base_url=c.url, timeout=60) as client:
        others = [
            client.post("/v1/completions", json=body(i % len(DRAWN), seed=1000 + i, max_tokens=5 + i, n=1))
            for i in range(20)
        ]
        wanted = [client.post("/v1/completions", json=body(i)) for i in range(len(DRAWN))]
        crowd = asyncio.gather(*others)
        answers = await asyncio.gather(*wanted)
        await crowd
    return [tokens_of(a.json()) for a in answers]


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    assert "choices" in answer, answer
    return [c["token_ids"] for c in sorted(answer["choices"], key=lambda c: c["index"])]


@pytest.mark.timeout(300)
def test_a_seed_fixes_the_answer(tiny_llama: Path, tmp_path: Path) -> None:
    with Cluster(tiny_llama, tmp_path / "one") as c:
        expected = alone(c)
        assert len({str(t) for t in expected[4]}) == 3, "the three outputs of one request differ"
        assert asyncio.run(in_a_crowd(c)) == expected
        unseeded = [tokens_of(c.post("/v1/completions", body(0, seed=None))[1]) for _ in range(3)]
        assert len({str(t) for t in unseeded}) == 3, "without a seed, answers differ"
        c.wait_until_idle()

    with Cluster(tiny_llama, tmp_path / "two", prefill=[{}, {"prefill.chunk_tokens": 16}], decode=[{}, {}]) as c:
        assert asyncio.run(in_a_crowd(c)) == expected
        c.wait_until_idle()

    settings = {"decode.sample_first_token": True}
    with Cluster(tiny_llama, tmp_path / "drawn-in-decode", settings=settings) as c:
        assert alone(c) == expected
        assert asyncio.run(in_a_crowd(c)) == expected
        c.wait_until_idle()

    with Cluster(tiny_llama, tmp_path / "colocated", prefill=[], decode=[{"decode.colocated": True}]) as c:
        assert alone(c) == expected
        assert asyncio.run(in_a_crowd(c)) == expected
        c.wait_until_idle()
