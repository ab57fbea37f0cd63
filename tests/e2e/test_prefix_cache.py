"""A prefix that was computed once is not computed again, and the answers are those of transformers (float32)."""

import asyncio
import random
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import Cluster, wait_until
from tests.reference import Reference
from tests.tiny_models import VOCAB_SIZE, Kind, make_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BLOCK = 16
NUM_TOKENS = 10
# What prefill's own pool does, by itself: nothing is had from other workers, and decode prefills nothing.
ALONE = {"kvstore.use": "false", "decode.max_local_prefill_tokens": 0}


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    fields = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return fields | {"return_token_ids": True} | more


def ask(c: Cluster, prompt: list[int], **more: Any) -> dict[str, Any]:
    status, answer = c.post("/v1/completions", body(prompt, **more))
    assert status == 200, answer
    return answer


async def ask_all(c: Cluster, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """All at once, so that they meet in batches, and in the pool."""
    async with httpx.AsyncClient(base_url=c.url, timeout=120, limits=httpx.Limits(max_connections=64)) as client:

        async def one(prompt: list[int]) -> dict[str, Any]:
            response = await client.post("/v1/completions", json=body(prompt))
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        return list(await asyncio.gather(*map(one, prompts)))


def cached(answer: dict[str, Any]) -> int:
    num: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num


def tokens(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def assert_right(reference: Reference, prompt: list[int], answer: dict[str, Any]) -> None:
    want, got = reference.greedy(prompt, NUM_TOKENS), tokens(answer)
    assert got == want, reference.explain(prompt, want, got)


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def families(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Prompts of which many begin alike, for a block or for many, and part within a block or at its edge; some are
    another's beginning, some are the same."""
    roots = [drawn(rng, longest) for _ in range(1 + count // 5)]
    prompts: list[list[int]] = []
    for _ in range(count):
        stem = rng.choice(roots if not prompts or rng.random() < 0.6 else prompts)
        shared = rng.choice([len(stem), rng.randint(1, len(stem)), len(stem) // BLOCK * BLOCK])
        prompts.append((stem[:shared] + drawn(rng, rng.choice([0, 1, 7, 16, 90])))[:longest] or drawn(rng, 1))
    return prompts


def test_the_same_prompt_again_is_computed_from_its_last_block_on(
    tiny_llama: Path, tmp_path: Path, reference: Reference
) -> None:
    rng = random.Random(1)
    with Cluster(tiny_llama, tmp_path, settings=ALONE) as c:
        for num in (1, 15, 16, 17, 32, 33, 100, 512, 513, 700):
            prompt = drawn(rng, num)
            first, again = ask(c, prompt), ask(c, prompt)
            assert_right(reference, prompt, first)
            assert_right(reference, prompt, again)
            assert (cached(first), cached(again)) == (0, (num - 1) // BLOCK * BLOCK), f"a prompt of {num}"
        c.wait_until_idle()


def test_each_turn_of_a_conversation_computes_what_is_new(
    tiny_llama: Path, tmp_path: Path, reference: Reference
) -> None:
    rng = random.Random(2)
    with Cluster(tiny_llama, tmp_path, settings=ALONE) as c:
        history: list[int] = []
        before = 0
        for turn in range(8):
            prompt = history + drawn(rng, 20 + 13 * turn)
            answer = ask(c, prompt)
            assert_right(reference, prompt, answer)
            assert cached(answer) == before, f"turn {turn}"
            before = len(prompt) // BLOCK * BLOCK
            history = prompt + tokens(answer)
        c.wait_until_idle()


def test_nothing_is_shared_between_salts_nor_where_it_is_not_wanted(
    tiny_llama: Path, tmp_path: Path, reference: Reference
) -> None:
    prompt = drawn(random.Random(3), 100)
    off = {"kv.prefix_cache": "false"}
    with Cluster(tiny_llama, tmp_path, settings=ALONE) as c:
        salts = ["a", "b", None, "a", "b", None]
        answers = [ask(c, prompt, cache_salt=salt) for salt in salts]
        assert [cached(a) for a in answers] == [0, 0, 0, 96, 96, 96]
        # Logprobs of a prompt come from its every token.
        other = drawn(random.Random(4), 100)
        with_logprobs = [ask(c, p, echo=True, logprobs=1) for p in (prompt, other)]
        assert [cached(a) for a in with_logprobs] == [0, 0]
        assert len(with_logprobs[0]["choices"][0]["logprobs"]["token_logprobs"]) == len(prompt) + NUM_TOKENS
        assert cached(ask(c, other)) == 96, "computed with logprobs, it serves others"
        c.start("prefill", "prefill-off", off)
        c.wait_for_workers({"prefill-off"})
        assert c["prefill-0"].terminate() == 0
        answers += [ask(c, prompt), ask(c, prompt)]
        assert [cached(a) for a in answers[-2:]] == [0, 0]
        for answer in answers:
            assert_right(reference, prompt, answer)
        c.wait_until_idle()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])  # the latter with sliding windows
def test_prompts_that_begin_alike_all_get_their_own_answer(kind: Kind, tmp_path: Path) -> None:
    model = make_tiny(kind, tmp_path / kind)
    reference = Reference(model)
    prompts = families(random.Random(kind), 50, 300)
    with Cluster(model, tmp_path / "run", settings=ALONE | {"prefill.chunk_tokens": 64}) as c:
        at_once = asyncio.run(ask_all(c, prompts))
        one_by_one = [ask(c, p) for p in prompts]
        for prompt, answer in zip(prompts * 2, at_once + one_by_one, strict=True):
            assert_right(reference, prompt, answer)
        assert [cached(a) for a in one_by_one] == [(len(p) - 1) // BLOCK * BLOCK for p in prompts]
        c.wait_until_idle()


def counted(c: Cluster, worker_id: str, name: str, **labels: str) -> float:
    """One of a worker's counters, by its newest life."""
    with urllib.request.urlopen(c.registry()[worker_id].http_url + "/metrics", timeout=5) as r:
        families = list(text_string_to_metric_families(r.read().decode()))
    samples = [s for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items()]
    return sum(s.value for s in samples)


@pytest.mark.parametrize("where", ["pool", "dram"])
@pytest.mark.parametrize("kind_of_transport", ["shm", "tcp"])
def test_a_prefill_worker_that_is_new_fetches_what_others_hold(
    where: str, kind_of_transport: str, tiny_llama: Path, tmp_path: Path, reference: Reference
) -> None:
    """From the pool of the decode worker that answered, or from a store node. Then it has it itself."""
    rng = random.Random(6)
    prompt = drawn(rng, 500)
    settings = {"decode.max_local_prefill_tokens": 0, "transport.kind": kind_of_transport}
    kvstore: list[dict[str, Any]] = [{}] if where == "dram" else []
    with Cluster(tiny_llama, tmp_path, kvstore=kvstore, settings=settings) as c:
        first = ask(c, prompt)
        c.wait_until_idle()  # what is on offer is held
        c.start("prefill", "prefill-1")
        if where == "dram":
            c.start("decode", "decode-1")
        c.wait_for_workers({"prefill-1"} | ({"decode-1"} if where == "dram" else set()))
        for worker_id in ["prefill-0"] + (["decode-0"] if where == "dram" else []):
            assert c[worker_id].terminate() == 0
            wait_until(lambda i=worker_id: i not in c.registry(), 10, "it has left")  # type: ignore[misc]
        longer = prompt + drawn(rng, 5)
        again = ask(c, longer)
        assert_right(reference, prompt, first)
        assert_right(reference, longer, again)
        assert (cached(first), cached(again)) == (0, 496)
        assert counted(c, "prefill-1", "distserve_store_fetched_blocks_total") == 31
        assert counted(c, "prefill-1", "distserve_store_hit_blocks_total", tier=where) == 31
        assert counted(c, "prefill-1", "distserve_cached_prompt_tokens_total") == 496
        assert cached(ask(c, prompt)) == 496
        assert counted(c, "prefill-1", "distserve_store_lookups_total") == 1, "it has it itself"
        c.wait_until_idle()


@pytest.mark.parametrize("store", [False, True])
def test_a_pool_that_evicts_all_the_time_serves_right_and_leaks_nothing(
    store: bool, tiny_llama: Path, tmp_path: Path, reference: Reference
) -> None:
    """With a store what was evicted comes back from there, into a pool that has hardly room for it."""
    num_blocks = 24
    prompts = families(random.Random(5), 60, 200)
    blocks = {tuple(p[: i + BLOCK]) for p in prompts for i in range(0, len(p) - BLOCK + 1, BLOCK)}
    assert len(blocks) > 3 * num_blocks, "too few to make it evict"
    small = {"kv.num_blocks": num_blocks, "prefill.chunk_tokens": 32}
    settings = {"decode.max_local_prefill_tokens": 0} if store else ALONE
    with Cluster(tiny_llama, tmp_path, prefill=[small], kvstore=[{}] if store else [], settings=settings) as c:
        answers = asyncio.run(ask_all(c, prompts))
        answers += [ask(c, p) for p in prompts]
        for prompt, answer in zip(prompts * 2, answers, strict=True):
            assert_right(reference, prompt, answer)
        assert sum(map(cached, answers[len(prompts) :])) > 20 * BLOCK, "what is recent is found"
        if store:
            assert counted(c, "prefill-0", "distserve_store_fetched_blocks_total") > 0
        c.wait_until_idle()
        assert c["prefill-0"].terminate() == 0
