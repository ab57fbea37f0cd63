"""Decode computes prompts itself: alone while the last prefill worker is gone, which it says, and short ones while
prefill is behind."""

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import Cluster, wait_until
from tests.reference import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NUM_TOKENS = 12
NUM_LONG = 24
SHORT, LONG = [9, 8, 7], [5 + i % 300 for i in range(900)]  # the long one in several chunks


def health(c: Cluster) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(c.url + "/health/ready", timeout=5) as r:
            return r.status, json.load(r)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def routes(c: Cluster) -> dict[str, float]:
    with urllib.request.urlopen(c.url + "/metrics", timeout=5) as r:
        families = text_string_to_metric_families(r.read().decode())
        return {
            sample.labels["kind"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "distserve_gateway_routes_total"
        }


def answer(c: Cluster, prompt: list[int]) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    status, found = c.post("/v1/completions", body | {"return_token_ids": True})
    assert status == 200, found
    ids: list[int] = found["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("max_local", [0, 256])
def test_decode_answers_alone_until_prefill_is_back(
    max_local: int, tiny_llama: Path, reference: Reference, tmp_path: Path
) -> None:
    expected = {len(prompt): reference.greedy(prompt, NUM_TOKENS) for prompt in (SHORT, LONG)}
    settings = {"decode.max_local_prefill_tokens": max_local, "kv.prefix_cache": "false"}
    with Cluster(tiny_llama, tmp_path, settings=settings) as c:
        assert answer(c, SHORT) == expected[len(SHORT)]
        assert health(c)[1]["status"] == "ok"
        c["prefill-0"].kill()
        for prompt in (SHORT, LONG):  # the registry may still name it
            assert answer(c, prompt) == expected[len(prompt)]
        wait_until(lambda: health(c)[1]["status"] == "degraded", 10, "the gateway says so")
        status, said = health(c)
        assert status == 200
        assert "no prefill worker for model 'tiny' is ready: decode prefills itself" in said["reasons"]
        assert answer(c, SHORT) == expected[len(SHORT)]
        assert routes(c) | {"pair": 0} == {"pair": 0, "local": 0, "spill": 0, "alone": 3, "colocated": 0}

        c.start("prefill", "prefill-9")
        c.wait_for_workers({"prefill-9"})
        wait_until(lambda: health(c)[1]["status"] == "ok", 10, "the gateway knows of the new one")
        before = routes(c)["pair"]
        for prompt in (SHORT, LONG):
            assert answer(c, prompt) == expected[len(prompt)]
        assert routes(c)["pair"] == before + 2
        c.wait_until_idle()


def test_short_prompts_spill_to_decode_while_prefill_is_behind(
    tiny_llama: Path, reference: Reference, tmp_path: Path
) -> None:
    slow = {"prefill.chunk_tokens": 16, "prefill.max_batch_tokens": 16}
    expected = reference.greedy(SHORT, NUM_TOKENS)
    settings = {"kv.prefix_cache": "false", "bus.beat_s": 0.2}
    with Cluster(tiny_llama, tmp_path, prefill=[slow], settings=settings) as c:
        assert answer(c, LONG) == reference.greedy(LONG, NUM_TOKENS)  # prefill knows its speed now
        wait_until(lambda: c.registry()["prefill-0"].load.speed.known, 10, "and has said so")
        longs = [threading.Thread(target=answer, args=(c, [7 + i] * 1800)) for i in range(NUM_LONG)]
        for thread in longs:
            thread.start()
        wait_until(lambda: c.registry()["prefill-0"].load.num_waiting > 0, 20, "prefill is behind")
        assert answer(c, SHORT) == expected
        assert routes(c)["spill"] == 1
        for thread in longs:
            thread.join(60)
        assert routes(c)["pair"] == 1 + NUM_LONG
        c.wait_until_idle()
        assert answer(c, SHORT) == expected
        assert routes(c)["spill"] == 1, "prefill is not behind any more"
