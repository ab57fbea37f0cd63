"""200 streams at once: every one complete and right, nobody gets another's answer, every block comes back."""

import asyncio
import json
import random
from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster
from tests.reference import Reference
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.e2e

NUM_STREAMS = 200
NUM_PROMPTS = 40  # distinct ones, so that the reference stays cheap and every answer is asked for five times


@pytest.mark.timeout(240)
def test_two_hundred_streams(tiny_llama: Path, reference: Reference, tmp_path: Path) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 200))] for _ in range(NUM_PROMPTS)]
    lengths = [rng.randrange(1, 40) for _ in range(NUM_PROMPTS)]
    expected = [reference.greedy(p, n) for p, n in zip(prompts, lengths, strict=True)]
    # A pool far too small for all of them: leases queue, and running sequences are preempted.
    settings = {"kv.num_blocks": 130, "prefill.max_waiting": 400, "decode.max_num_seqs": 32}
    with Cluster(tiny_llama, tmp_path, settings=settings) as c:
        streams = asyncio.run(run(c, prompts, lengths))
        c.wait_until_idle()
    for i, (tokens, reason, tokens_said) in enumerate(streams):
        which = i % NUM_PROMPTS
        assert tokens == expected[which], reference.explain(prompts[which], expected[which], tokens)
        assert (reason, tokens_said) == ("length", lengths[which])


async def run(c: Cluster, prompts: list[list[int]], lengths: list[int]) -> list[tuple[list[int], str, int]]:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=c.url, timeout=httpx.Timeout(200), limits=limits) as client:

        async def stream(i: int) -> tuple[list[int], str, int]:
            body = {
                "model": "tiny",
                "prompt": prompts[i % NUM_PROMPTS],
                "max_tokens": lengths[i % NUM_PROMPTS],
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            tokens: list[int] = []
            reason, counted = "", -1
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        tokens += choice.get("token_ids") or []
                        reason = choice["finish_reason"] or reason
                    if event.get("usage"):
                        counted = event["usage"]["completion_tokens"]
            return tokens, reason, counted

        return list(await asyncio.gather(*(stream(i) for i in range(NUM_STREAMS))))
