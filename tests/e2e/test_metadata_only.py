"""No tensor travels through NATS: the server's own count of bytes says so."""

import pytest

from tests.cluster import Cluster

pytestmark = pytest.mark.e2e


def test_nats_carries_token_ids_and_grants_but_no_kv(cluster: Cluster) -> None:
    body = {"model": "tiny", "max_tokens": 2, "temperature": 0, "ignore_eos": True, "timings": True}
    cluster.post("/v1/completions", body | {"prompt": [1, 2, 3]})
    before = cluster.nats_bytes()
    status, answer = cluster.post("/v1/completions", body | {"prompt": [7] * 2000})
    moved = cluster.nats_bytes() - before
    assert status == 200
    kv_bytes = answer["timings"]["kv_bytes"]
    assert kv_bytes >= 2000 * 2 * 2 * 16 * 4, "KV of 2,000 tokens has moved by another way"
    # 2,000 token ids are 2 kB in the request; the rest is grants, tokens and heartbeats.
    assert moved < 32 * 1024 < kv_bytes / 10, f"{moved} bytes through NATS for {kv_bytes} bytes of KV"
