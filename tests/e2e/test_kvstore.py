"""The store in a whole cluster: what was computed once is not computed again, wherever it lies, and the answers are the
same with it, without it and after every loss."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from distserve.bus import subjects
from distserve.bus.nats import NatsBus
from distserve.kv.layout import block_bytes
from distserve.messages import StoreStats, StoreStatsRequest, Tier, decode_as, encode
from tests.cluster import Cluster, wait_until
from tests.reference import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("kvstore"), pytest.mark.timeout(300)]
BLOCK = 16
NUM_TURNS = 10
NODE = "kvstore-0"


@pytest.fixture
def cluster(tiny_llama: Path, tmp_path: Path) -> Iterator[Cluster]:
    # A single block is worth fetching here: the first turn leaves but one that prefill lacks.
    settings = {"model.dtype": "float32", "kvstore.min_fetch_blocks": 1}
    with Cluster(tiny_llama, tmp_path, kvstore=[{}], settings=settings) as c:
        yield c
        c.wait_until_idle()


def stats(cluster: Cluster, node: str = NODE) -> StoreStats:
    async def ask() -> StoreStats:
        async with await NatsBus.connect(cluster.nats_url, name="test") as bus:
            answer = await bus.request(subjects.worker("kvstore", node), encode(StoreStatsRequest()), timeout_s=5)
            return decode_as(StoreStats, answer)

    return asyncio.run(ask())


class Conversation:
    """One whose every turn adds a few tokens of the user's to all that was said."""

    def __init__(self, cluster: Cluster, reference: Reference, seed: int = 0, name: str = "talk") -> None:
        self.cluster, self.reference, self.name = cluster, reference, name
        self.tokens: list[int] = []
        self.timings: dict[str, Any] = {}  # of the last turn
        self._rng = random.Random(seed)

    def turn(self, num_new: int = 40, num_out: int = 24) -> tuple[int, int]:
        """(tokens not computed, tokens that could have been known). Asserts that the answer is the model's."""
        known = max(0, len(self.tokens) - 1)  # the KV of the last one drawn was never needed
        prompt = self.tokens + [self._rng.randrange(3, 380) for _ in range(num_new)]
        status, body = self.cluster.post(
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": num_out,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "session_id": self.name,
                "timings": True,
            },
        )
        assert status == 200, body
        got = body["choices"][0]["token_ids"]
        expected = self.reference.greedy(prompt, num_out)
        assert got == expected, self.reference.explain(prompt, expected, got)
        self.tokens = prompt + got
        self.timings = body["timings"]
        return body["usage"]["prompt_tokens_details"]["cached_tokens"], known

    def num_blocks(self) -> int:
        """Full blocks of what has KV."""
        return (len(self.tokens) - 1) // BLOCK


def on_disk(cluster: Cluster, num_blocks: int) -> None:
    def there() -> bool:
        tier = stats(cluster).tiers.get("disk")
        return tier is not None and tier.num_blocks >= num_blocks

    wait_until(there, 20, f"{num_blocks} blocks are on disk")


def restart_workers(
    cluster: Cluster, roles: Sequence[str] = ("prefill", "decode"), settings: Mapping[str, Any] | None = None
) -> None:
    """Their pools are empty afterwards: whatever is known of a prompt then comes from the store."""
    for role in roles:
        worker = cluster[f"{role}-0"]
        worker.terminate()
        wait_until(lambda w=worker: w.id not in cluster.registry(), 10, f"{worker.id} has left")  # type: ignore[misc]
    for role in roles:
        cluster.start(role, f"{role}-0", settings)
    cluster.wait_for_workers({f"{role}-0" for role in roles})


def restart_store(cluster: Cluster, *, wipe: bool = False) -> None:
    cluster[NODE].kill()
    wait_until(lambda: NODE not in cluster.registry(), 10, "the node's entry has expired")
    if wipe:
        shutil.rmtree(cluster.folder / NODE)
    cluster.start("kvstore", NODE)


def hits(cluster: Cluster, tier: Tier) -> int:
    found = stats(cluster).tiers.get(tier)
    return 0 if found is None else found.num_hits


def test_a_conversation_of_ten_turns_computes_each_token_once(cluster: Cluster, reference: Reference) -> None:
    talk = Conversation(cluster, reference)
    for turn in range(NUM_TURNS):
        cached, known = talk.turn()
        assert cached == known // BLOCK * BLOCK, f"turn {turn}: {cached} of {known} known tokens were not computed"


def test_a_decode_worker_prefills_what_is_new_of_a_conversation_that_it_holds(
    cluster: Cluster, reference: Reference
) -> None:
    talk = Conversation(cluster, reference)
    handed_over = []
    for _ in range(6):
        talk.turn()
        handed_over.append(talk.timings["transport"] != "")
    assert handed_over == [True, True, False, False, False, False], "from when it holds more than half of the prompt"


def test_of_a_conversation_only_what_is_new_is_handed_over(
    tiny_llama: Path, tmp_path: Path, reference: Reference
) -> None:
    settings = {"model.dtype": "float32", "decode.max_local_prefill_tokens": 0}
    with Cluster(tiny_llama, tmp_path, settings=settings) as c:
        layout = c.registry()["decode-0"].layout
        assert layout is not None
        talk = Conversation(c, reference)
        for turn in range(5):
            _, known = talk.turn(num_new=40, num_out=24)
            travelled = -(-(len(talk.tokens) - 24) // BLOCK) - known // BLOCK
            assert talk.timings["kv_bytes"] == travelled * block_bytes(layout), f"turn {turn}"
        c.wait_until_idle()


def test_a_colocated_worker_keeps_conversations_and_has_them_from_the_store(
    tiny_llama: Path, tmp_path: Path, reference: Reference
) -> None:
    alone = {"decode.colocated": "true"}
    settings = {"model.dtype": "float32"}
    with Cluster(tiny_llama, tmp_path, prefill=[], decode=[alone], kvstore=[{}], settings=settings) as c:
        talk = Conversation(c, reference)
        for _ in range(3):
            cached, known = talk.turn()
            assert cached == known // BLOCK * BLOCK
        on_disk(c, talk.num_blocks())
        restart_workers(c, ["decode"], alone)
        cached, known = talk.turn()
        assert cached == known // BLOCK * BLOCK, "from the node's memory"
        assert hits(c, "dram") >= known // BLOCK
        c.wait_until_idle()


def test_a_conversation_outlives_the_workers_the_node_and_the_disk(cluster: Cluster, reference: Reference) -> None:
    talk = Conversation(cluster, reference)
    for _ in range(3):
        talk.turn()
    on_disk(cluster, talk.num_blocks())

    restart_workers(cluster)
    before = hits(cluster, "dram")
    cached, known = talk.turn()
    assert cached == known // BLOCK * BLOCK, "from the node's memory"
    assert hits(cluster, "dram") - before >= known // BLOCK
    on_disk(cluster, talk.num_blocks())

    restart_store(cluster)
    restart_workers(cluster)
    cluster.wait_for_workers({NODE})
    cached, known = talk.turn()
    assert cached == known // BLOCK * BLOCK, "from disk"
    assert hits(cluster, "disk") >= known // BLOCK

    restart_store(cluster, wipe=True)
    restart_workers(cluster)
    cluster.wait_for_workers({NODE})
    cached, _ = talk.turn()
    assert cached == 0, "nothing is left that could be known"
    cached, known = talk.turn()
    assert cached == known // BLOCK * BLOCK


def test_without_its_node_the_cluster_answers_as_before(cluster: Cluster, reference: Reference) -> None:
    talk = Conversation(cluster, reference)
    talk.turn()
    cluster[NODE].freeze()
    try:
        for _ in range(3):
            talk.turn()
        cluster[NODE].kill()
        for _ in range(2):
            talk.turn()
    finally:
        if cluster[NODE].process.poll() is None:
            cluster[NODE].kill()


def test_another_salt_finds_nothing(cluster: Cluster, reference: Reference) -> None:
    rng = random.Random(7)
    prompt = [rng.randrange(3, 380) for _ in range(200)]
    cached = {}
    for salt in ("a", "b", "a", None):
        status, body = cluster.post(
            "/v1/completions",
            {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            | ({} if salt is None else {"cache_salt": salt}),
        )
        assert status == 200, body
        cached.setdefault(salt, []).append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == {"a": [0, 192], "b": [0], None: [0]}
