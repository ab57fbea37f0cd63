"""The decode worker that the gateway chose is gone when prefill wants to hand over: another one gets the sequence."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, wait_until
from tests.reference import Reference
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NUM_TOKENS = 12
# Prompts wait in prefill's queue for a while: what they were told of decode workers grows old. And the gateway doesn't
# ask after them meanwhile.
SETTINGS = {"prefill.chunk_tokens": 16, "prefill.max_batch_tokens": 16, "bus.beat_s": 0.2, "gateway.silence_s": 10}


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(1800 + 10 * i)] for i in range(count)]


def ask(c: Cluster, prompt: list[int]) -> tuple[int, dict[str, Any]]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return c.post("/v1/completions", body)


def assert_right(reference: Reference, prompt: list[int], answer: tuple[int, dict[str, Any]]) -> None:
    status, body = answer
    assert status == 200, body
    want, got = reference.greedy(prompt, NUM_TOKENS), body["choices"][0]["token_ids"]
    assert got == want, reference.explain(prompt, want, got)


def went_elsewhere(c: Cluster) -> int:
    """How many hand-overs prefill tried with decode-0 in vain."""
    lines = c["prefill-0"].log.read_text().splitlines()
    return sum("no lease for" in line and "from decode-0" in line for line in lines)


def test_a_decode_worker_that_leaves_while_requests_stream_in_fails_none(
    tiny_llama: Path, tmp_path: Path, reference: Reference
) -> None:
    settings = SETTINGS | {"decode.drain_s": 60}
    with Cluster(tiny_llama, tmp_path, decode=[{}, {}], settings=settings) as c, ThreadPoolExecutor(16) as clients:
        early, late = prompts(10), prompts(5)
        asked = [clients.submit(ask, c, p) for p in early]
        wait_until(lambda: c.registry()["prefill-0"].load.num_waiting >= 6, 30, "prompts wait in prefill")
        leaving = clients.submit(c["decode-0"].terminate, 60)
        asked += [clients.submit(ask, c, p) for p in late]  # they may still be sent to the one that leaves
        assert leaving.result(60) == 0
        assert sum(not a.done() for a in asked) >= 5, "it left with prompts on their way to it"
        for prompt, answer in zip(early + late, asked, strict=True):
            assert_right(reference, prompt, answer.result(60))
        assert went_elsewhere(c) >= 1
        c.wait_until_idle()


def test_a_decode_worker_killed_between_submission_and_hand_over(
    tiny_llama: Path, tmp_path: Path, reference: Reference
) -> None:
    with Cluster(tiny_llama, tmp_path, decode=[{}, {}], settings=SETTINGS) as c, ThreadPoolExecutor(16) as clients:
        asked = prompts(8)
        answers = [clients.submit(ask, c, p) for p in asked]
        wait_until(lambda: c.registry()["prefill-0"].load.num_waiting >= 5, 30, "prompts wait in prefill")
        c["prefill-0"].freeze()  # so that decode finishes what it has, and gets nothing new
        since = {i: c.registry()[i].beat for i in ("decode-0", "decode-1")}
        wait_until(
            lambda: all(
                w.beat > since[i] + 1 and not w.load.num_running for i, w in c.registry().items() if i in since
            ),
            10,
            "nothing runs on decode",
        )
        c["decode-0"].kill()
        c["prefill-0"].thaw()
        for prompt, answer in zip(asked, answers, strict=True):
            assert_right(reference, prompt, answer.result(60))
        assert went_elsewhere(c) >= 1
        c.wait_until_idle()
