"""Through gateway, prefill and decode, over both transports and from what their pools kept, token for token what
transformers generates (float32)."""

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster
from tests.reference import Reference
from tests.tiny_models import KINDS, VOCAB_SIZE, Kind, make_tiny

pytestmark = pytest.mark.e2e

# Block edges and one to either side, the sliding windows' (32 to 64) too, chunk edges (512), and long ones.
LENGTHS = (
    1,
    2,
    3,
    15,
    16,
    17,
    31,
    32,
    33,
    47,
    48,
    49,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    255,
    256,
    257,
    511,
    512,
    513,
    700,
)
NUM_TOKENS = 24


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(300)
def test_answers_equal_generate(kind: Kind, tmp_path: Path) -> None:
    model = make_tiny(kind, tmp_path / kind)
    reference = Reference(model)
    rng = random.Random(kind)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]
    expected = [reference.greedy(p, NUM_TOKENS) for p in prompts]
    with Cluster(model, tmp_path / "run", prefill=[{"transport.kind": "shm"}]) as c:
        for kind_of_transport in ("shm", "tcp"):
            # With a salt of its own, so that nothing is known of the prompts: all of them are handed over.
            answers = asyncio.run(ask_all(c, prompts, kind_of_transport))
            check_tokens(answers, prompts, expected, reference)
            for answer in answers:
                assert answer["timings"]["transport"] == kind_of_transport
                assert answer["timings"]["kv_bytes"] > 0
            c.wait_until_idle()
            if kind_of_transport == "shm":  # the other one joins, the first leaves, the cluster stays
                c.start("prefill", "prefill-tcp", {"transport.kind": "tcp", "prefill.chunk_tokens": 128})
                c.wait_for_workers({"prefill-tcp"})
                assert c["prefill-0"].terminate() == 0
        answers = asyncio.run(ask_all(c, prompts, "tcp"))
        check_tokens(answers, prompts, expected, reference)
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
        c.wait_until_idle()


def check_tokens(
    answers: list[dict[str, Any]], prompts: list[list[int]], expected: list[list[int]], reference: Reference
) -> None:
    for i, (prompt, full, answer) in enumerate(zip(prompts, expected, answers, strict=True)):
        want, got = full[: num_tokens(i)], answer["choices"][0]["token_ids"]
        assert got == want, reference.explain(prompt, want, got)


def num_tokens(i: int) -> int:
    return NUM_TOKENS - i % 5  # so that they leave one after another


async def ask_all(cluster: Cluster, prompts: list[list[int]], salt: str) -> list[dict[str, Any]]:
    """All at once, so that batches form, and sequences of all lengths join and leave them."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=httpx.Limits(max_connections=64)) as client:

        async def ask(i: int, prompt: list[int]) -> dict[str, Any]:
            body = {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": num_tokens(i),
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "timings": True,
                "cache_salt": salt,
            }
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        return list(await asyncio.gather(*(ask(i, p) for i, p in enumerate(prompts))))
