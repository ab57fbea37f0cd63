"""Promised first tokens at a prefill worker that has several times what it can compute: a no comes at once, and says
when to come again."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NUM_TOKENS = 1600
NUM_REQUESTS = 48
ROOM = 8  # so many prompts fit into what is promised
SLOW = {"prefill.chunk_tokens": 16, "prefill.max_batch_tokens": 16}  # a prompt at a time, in a hundred passes


class Asker:
    def __init__(self, c: Cluster, http: httpx.Client) -> None:
        self._url = f"{c.url}/v1/completions"
        self._http = http

    def __call__(self, seed: int, ttft_ms: float | None) -> httpx.Response:
        body: dict[str, Any] = {"model": "tiny", "prompt": [3 + seed % 300] * NUM_TOKENS, "max_tokens": 1}
        return self._http.post(self._url, json=body | {"ttft_slo_ms": ttft_ms})


def alone_s(c: Cluster) -> float:
    """What such a prompt takes, by the worker's own word; 0: it doesn't know yet."""
    load = c.registry()["prefill-0"].load
    return load.speed.prefill_s(NUM_TOKENS, 0, load.pass_tokens) if load.speed.known else 0.0


def test_an_overloaded_prefill_worker_refuses_what_would_be_late(tiny_llama: Path, tmp_path: Path) -> None:
    settings = {"kv.prefix_cache": "false", "decode.max_local_prefill_tokens": 0, "bus.beat_s": 0.2}
    limits = httpx.Limits(max_connections=NUM_REQUESTS)
    with (
        Cluster(tiny_llama, tmp_path, prefill=[SLOW], settings=settings) as c,
        httpx.Client(timeout=60, limits=limits) as http,
    ):
        ask = Asker(c, http)
        for seed in range(3):
            assert ask(seed, None).status_code == 200
        wait_until(lambda: alone_s(c) > 0, 10, "the worker knows its speed")
        took_ms = 1000 * alone_s(c)
        ttft_ms = ROOM * took_ms
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            answers = list(pool.map(lambda seed: ask(seed, ttft_ms), range(NUM_REQUESTS)))

        refused = [r for r in answers if r.status_code != 200]
        num_accepted = NUM_REQUESTS - len(refused)
        assert 1 <= num_accepted <= NUM_REQUESTS / 2, "all of them are six times what fits into the promise"
        for r in refused:
            assert (r.status_code, r.json()["error"]["code"]) == (429, "slo_unattainable")
            assert 0 < float(r.headers["retry-after-ms"]) < 2 * NUM_REQUESTS / ROOM * ttft_ms
            assert int(r.headers["retry-after"]) >= 1
            assert r.json()["error"]["retry_after_ms"] == int(r.headers["retry-after-ms"])

        # By its word, not before. The machine may have slowed down since: then it is told again.
        late = refused[-1]
        for _ in range(3):
            time.sleep(float(late.headers["retry-after-ms"]) / 1000)
            late = ask(0, ttft_ms)
            if late.status_code == 200:
                break
        assert late.status_code == 200, late.text

        hopeless = ask(0, took_ms / 4)
        assert hopeless.status_code == 429, hopeless.text
        assert "retry-after" not in hopeless.headers
        c.wait_until_idle()
