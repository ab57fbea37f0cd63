"""The whole engine on a GPU: tokens of stock models by generate(), by passes and by recorded steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from distserve.engine.batching import Batch, Work
from distserve.engine.model import load_model
from distserve.engine.paged_cache import PagedCache
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.messages import SamplingParams, SequenceKey, num_blocks_for
from tests.tiny_models import KINDS, VOCAB_SIZE, Kind, make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BLOCK_SIZE = 16
LENGTHS = (1, 3, 15, 16, 17, 40, 64, 100, 130, 257)
NUM_NEW = 24


def prompt(n: int, seed: int = 0) -> list[int]:
    return [random.Random(1000 * seed + i).randrange(3, VOCAB_SIZE) for i in range(n)]


class Engine:
    def __init__(
        self, folder: Path, dtype: str, *, attention: str = "auto", recorded: bool = False, fused: bool = False
    ) -> None:
        self.model = load_model(folder, dtype=dtype, device="cuda", block_size=BLOCK_SIZE)
        self.cache = PagedCache(self.model.layout, 600, "cuda")
        self.cache.pool.fill_(float("nan"))  # as an earlier owner may leave it
        self.cache.pool[0].zero_()
        self.runner = ModelRunner(self.model, self.cache, attention=attention)
        if fused:
            self.runner.fuse()
            assert self.runner._fused is not None
        if recorded:
            self.runner.record_steps(12, 1024)
        self._free = list(range(1, 600))
        random.Random(3).shuffle(self._free)

    def add(self, token_ids: list[int], sampling: SamplingParams) -> Sequence:
        return Sequence(SequenceKey(f"r{len(self._free)}"), list(token_ids), len(token_ids), sampling)

    def step(self, sequences: list[Sequence], chunk: int = 10_000) -> None:
        batch = Batch()
        for s in sequences:
            num = min(chunk, s.num_uncomputed_tokens)
            stop = s.num_computed_tokens + num
            while len(s.block_table) < num_blocks_for(stop, BLOCK_SIZE):
                s.block_table.append(self._free.pop())
            batch.work.append(Work(s, s.num_computed_tokens, num, samples=stop == len(s.token_ids)))
        for sampled in self.runner.execute(batch):
            sampled.sequence.token_ids.append(sampled.token_id)
        for work in batch.work:
            work.sequence.num_computed_tokens += work.num_tokens

    def answers(self, prompts: list[list[int]], sampling: SamplingParams, chunk: int = 10_000) -> list[list[int]]:
        sequences = [self.add(p, sampling) for p in prompts]
        while any(s.num_output_tokens < NUM_NEW for s in sequences):
            self.step([s for s in sequences if s.num_output_tokens < NUM_NEW], chunk)
        return [s.token_ids[s.num_prompt_tokens :] for s in sequences]


GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_in_float32_are_those_of_generate(kind: Kind, tmp_path: Path) -> None:
    folder = make_tiny(kind, tmp_path / kind)
    prompts = [prompt(n, n) for n in LENGTHS]
    stock = load_model(folder, dtype="float32", device="cuda", block_size=BLOCK_SIZE, probe=False).model
    stock.set_attn_implementation("eager")
    wanted = []
    with torch.inference_mode():
        for p in prompts:
            ids = torch.tensor([p], device="cuda")
            out = stock.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None
            )
            wanted.append(out[0, len(p) :].tolist())
    recorded = Engine(folder, "float32", recorded=True)
    assert recorded.answers(prompts, GREEDY) == wanted
    assert recorded.answers(prompts, GREEDY, chunk=32) == wanted
    assert Engine(folder, "float32").answers(prompts, GREEDY) == wanted
    if kind in ("llama", "mistral", "qwen2", "qwen3"):
        fused = Engine(folder, "float32", recorded=True, fused=True)
        assert fused.answers(prompts, GREEDY) == wanted
        assert fused.answers(prompts, GREEDY, chunk=32) == wanted


def test_models_of_other_kinds_are_not_fused_and_say_so(tmp_path: Path) -> None:
    engine = Engine(make_tiny("gemma3", tmp_path / "gemma3"), "float32")
    engine.runner.fuse()
    assert engine.runner._fused is None


def test_steps_are_recorded_where_the_backend_is_tritons_and_used(tmp_path: Path) -> None:
    engine = Engine(make_tiny("llama", tmp_path / "llama"), "bfloat16", recorded=True)
    steps = engine.runner._steps
    assert engine.runner.attention == "triton"
    assert steps is not None
    assert steps.num_recorded == len((1, 2, 4, 8, 12))
    sequence = engine.add(prompt(20), GREEDY)
    engine.step([sequence])
    played = steps.play(Batch([Work(sequence, 20, 1, samples=True)]))
    assert played is not None
    assert played.logits.shape[0] == 1


def test_drawn_tokens_are_the_same_recorded_or_not(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama")
    sampling = SamplingParams(max_tokens=NUM_NEW, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
    prompts = [prompt(n, n) for n in (5, 40, 90)]
    answers = [Engine(folder, "float32", recorded=r).answers(prompts, sampling) for r in (False, True)]
    assert answers[0] == answers[1]


def test_in_bfloat16_recorded_steps_and_passes_agree_within_what_its_rounding_allows(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama")
    engine = Engine(folder, "bfloat16", recorded=True)
    steps = engine.runner._steps
    assert steps is not None
    sequences = [engine.add(prompt(n, n), GREEDY) for n in LENGTHS]
    engine.step(sequences)
    batch = Batch([Work(s, s.num_computed_tokens, 1, samples=True) for s in sequences])
    for s in sequences:
        while len(s.block_table) < num_blocks_for(len(s.token_ids), BLOCK_SIZE):
            s.block_table.append(engine._free.pop())
    played = steps.play(batch)
    assert played is not None
    logits = played.logits.clone()
    plain = engine.runner.forward_logits(batch)
    assert not logits.isnan().any()
    torch.testing.assert_close(logits.float(), plain.float(), atol=0.15, rtol=0.05)


def test_a_sequence_with_new_blocks_after_a_preemption_is_read_from_those(tmp_path: Path) -> None:
    engine = Engine(make_tiny("llama", tmp_path / "llama"), "float32", recorded=True)
    sequence = engine.add(prompt(50), GREEDY)
    for _ in range(8):
        engine.step([sequence])
    engine._free = sequence.block_table[::-1] + engine._free[::-1]  # other owners take the old ones
    sequence.block_table, sequence.num_computed_tokens = [], 0
    other = engine.add(prompt(60, 5), GREEDY)
    while sequence.num_output_tokens < NUM_NEW:
        engine.step([other, sequence])
    alone = engine.add(prompt(50), GREEDY)
    while alone.num_output_tokens < NUM_NEW:
        engine.step([alone])
    assert sequence.token_ids == alone.token_ids


def test_more_sequences_than_were_recorded_for_are_stepped_all_the_same(tmp_path: Path) -> None:
    engine = Engine(make_tiny("llama", tmp_path / "llama"), "float32", recorded=True)
    prompts = [prompt(20 + i, i) for i in range(14)]
    together = engine.answers(prompts, GREEDY)
    assert together == [engine.answers([p], GREEDY)[0] for p in prompts]
