"""The sdpa backend against attention written out token by token."""

from __future__ import annotations

import random

import pytest
import torch

from distserve.engine.attention import attention_backend, sdpa
from distserve.engine.batching import Batch, Work
from distserve.engine.context import BatchContext
from distserve.engine.paged_cache import PagedCache
from distserve.engine.sequence import Sequence
from distserve.errors import ConfigError
from distserve.messages import KVLayout, SamplingParams, SequenceKey, num_blocks_for

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 8, 16
TILE = 48  # small, so that short prompts have several
LAYOUT = KVLayout(
    weights="w",
    dtype="float32",
    num_layers=2,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    block_size=BLOCK,
    rope="{}",
)

# (start, num_tokens) of each work
BATCHES = {
    "prefill": [(0, 40)],
    "prefill longer than a tile": [(0, 2 * TILE + 7)],
    "chunk after a prefix": [(48, 33)],
    "chunk longer than a tile after a prefix": [(80, TILE + 20)],
    "decode of one": [(37, 1)],
    "first token alone": [(0, 1)],
    "decode of lengths far apart": [(700, 1), (3, 1), (16, 1), (690, 1), (31, 1), (15, 1)],
    "all mixed": [(5, 1), (0, 17), (200, 1), (32, 16), (0, 1), (33, 3), (64, 1)],
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 16, 40, 5000])
@pytest.mark.parametrize("name", BATCHES)
def test_sdpa_is_attention_written_out(
    name: str, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "QUERY_TILE", TILE)
    works, cache = make_works(BATCHES[name])
    generator = torch.Generator().manual_seed(1)
    context = BatchContext.build(Batch(works), cache, attention_backend("sdpa", cache.layout, "cpu"))
    num = context.token_ids.shape[1]
    query = torch.randn(num, HEADS, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, num, KV_HEADS, HEAD_DIM, generator=generator).unbind()
    for layer in range(2):  # twice: what is kept from the first layer must serve the second
        context.write(layer, key, value)
        out = context.plan.attend(layer, query, key, value, scale=0.3, window=window, softcap=softcap)
        assert out.shape == query.shape
        for row in context.rows:
            for i in range(row.num):
                wanted = attend_one(
                    cache, layer, row.work.sequence, row.start + i, query[row.first + i], window, softcap
                )
                torch.testing.assert_close(out[row.first + i], wanted, rtol=1e-4, atol=1e-5)


def attend_one(
    cache: PagedCache,
    layer: int,
    sequence: Sequence,
    position: int,
    query: torch.Tensor,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[HEADS, HEAD_DIM] for one token, from the pool's definition alone, in float64."""
    first = 0 if window is None else max(0, position + 1 - window)
    slots = [(sequence.block_table[p // BLOCK], p % BLOCK) for p in range(first, position + 1)]
    blocks, offsets = [block for block, _ in slots], [offset for _, offset in slots]
    key, value = (
        cache.pool[blocks, layer, kv, offsets].double().repeat_interleave(HEADS // KV_HEADS, 1) for kv in (0, 1)
    )
    scores = torch.einsum("khd,hd->hk", key, query.double()) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hk,khd->hd", scores.softmax(1), value).float()


def make_works(parts: list[tuple[int, int]]) -> tuple[list[Work], PagedCache]:
    """Works with shuffled block tables in a pool of random numbers."""
    blocks = [num_blocks_for(start + num, BLOCK) for start, num in parts]
    cache = PagedCache(LAYOUT, sum(blocks) + 1)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(0)))
    free = list(range(1, sum(blocks) + 1))
    random.Random(0).shuffle(free)
    works = []
    for i, ((start, num), count) in enumerate(zip(parts, blocks, strict=True)):
        ids = list(range(start + num))
        table = [free.pop() for _ in range(count)]
        sequence = Sequence(SequenceKey(str(i)), ids, len(ids), SamplingParams(max_tokens=1), start, table)
        works.append(Work(sequence, start, num, True))
    return works, cache


def test_what_an_earlier_owner_left_in_a_block_does_not_come_through() -> None:
    """NaN under a mask is still NaN, so a block that starts in a pass and isn't filled by it is zeroed."""
    works, cache = make_works([(0, 5), (16, 1), (0, 21)])
    for work in works:
        for block in work.sequence.block_table[work.start // BLOCK :]:
            cache.pool[block] = float("nan")
    context = BatchContext.build(Batch(works), cache, attention_backend("sdpa", cache.layout, "cpu"))
    num = context.token_ids.shape[1]
    query, (key, value) = torch.randn(num, HEADS, HEAD_DIM), torch.randn(2, num, KV_HEADS, HEAD_DIM).unbind()
    context.write(0, key, value)
    out = context.plan.attend(0, query, key, value, scale=1.0, window=None, softcap=None)
    assert out.isfinite().all()


def test_a_block_that_holds_earlier_tokens_is_not_zeroed() -> None:
    (work,), cache = make_works([(20, 3)])
    before = cache.pool.clone()
    BatchContext.build(Batch([work]), cache, attention_backend("sdpa", cache.layout, "cpu"))
    assert torch.equal(cache.pool, before)


def test_an_unknown_backend_is_refused_by_name() -> None:
    _, cache = make_works([(4, 4)])
    with pytest.raises(ConfigError, match=r"attention is 'sdqa', must be one of auto, sdpa, triton") as e:
        attention_backend("sdqa", cache.layout, "cpu")
    assert e.value.value == "sdqa"


def test_a_backend_that_a_device_has_not_is_refused_and_auto_takes_the_one_it_has() -> None:
    _, cache = make_works([(4, 4)])
    with pytest.raises(ConfigError, match=r"model\.attention is 'triton', but the device is cpu") as e:
        attention_backend("triton", cache.layout, "cpu")
    assert e.value.key == "model.attention"
    assert attention_backend("auto", cache.layout, "cpu").name == "sdpa"
