"""A bare loop around ModelRunner, as small as a worker can be, and transformers' generate to compare with."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from distserve.engine.batching import Batch, Sampled, Work
from distserve.engine.loaded import LoadedModel
from distserve.engine.model import load_model
from distserve.engine.native.loader import Candidate, Compiling
from distserve.engine.paged_cache import PagedCache
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.messages import SamplingParams, SequenceKey
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=10_000, temperature=0.0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random ordinary tokens."""
    draw = random.Random(1000 * length + seed)
    return [draw.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE) for _ in range(length)]


class Engine:
    """A runner and a free list. Blocks are handed out in a shuffled order, so tables are never consecutive."""

    def __init__(
        self, model: LoadedModel, num_blocks: int = 400, keep_hidden: bool = False, candidate: Candidate | None = None
    ) -> None:
        self.model = model
        self.cache = PagedCache(model.layout, num_blocks)
        self.runner = ModelRunner(model, self.cache, keep_hidden=keep_hidden, candidate=candidate)
        self._free = list(range(1, num_blocks))
        random.Random(7).shuffle(self._free)
        self._serial = 0

    @classmethod
    def load(cls, folder: Path) -> Engine:
        return cls(load_model(folder, dtype="float32"))

    @classmethod
    def load_compiled(cls, folder: Path, dtype: str = "float32", threads: int = 1) -> Engine:
        """One whose small passes run compiled from the next one on."""
        model = load_model(folder, dtype=dtype)
        compiling = Compiling(dtype)
        assert compiling.wait(300.0)
        candidate = Candidate(model, compiling, threads)
        engine = cls(model, candidate=candidate)
        sequence = engine.add(prompt_of(40))
        engine.run([sequence], 2)
        engine.release(sequence)
        assert candidate.outcome.startswith("compiled"), candidate.outcome
        return engine

    @property
    def num_free(self) -> int:
        return len(self._free)

    def add(self, prompt: list[int], sampling: SamplingParams = GREEDY) -> Sequence:
        self._serial += 1
        return Sequence(SequenceKey(f"r{self._serial}"), list(prompt), len(prompt), sampling)

    def step(self, sequences: Seq[Sequence], chunk: int = 10_000) -> list[Sampled]:
        """One pass: every sequence computes up to `chunk` of its uncomputed tokens and samples if none are left."""
        batch = Batch()
        for sequence in sequences:
            num = min(chunk, sequence.num_uncomputed_tokens)
            stop = sequence.num_computed_tokens + num
            for _ in range(sequence.blocks_missing(stop, self.cache.block_size)):
                sequence.block_table.append(self._free.pop())
            batch.work.append(Work(sequence, sequence.num_computed_tokens, num, stop == len(sequence.token_ids)))
        sampled = self.runner.execute(batch)
        for work in batch.work:
            work.sequence.num_computed_tokens += work.num_tokens
        for one in sampled:
            one.sequence.token_ids.append(one.token_id)
        return sampled

    def run(self, sequences: Seq[Sequence], num_output: int, chunk: int = 10_000) -> None:
        """Until each has num_output output tokens."""
        while running := [s for s in sequences if s.num_output_tokens < num_output]:
            self.step(running, chunk)

    def release(self, sequence: Sequence) -> None:
        self._free = sequence.block_table[::-1] + self._free
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0


class Reference:
    """transformers' own greedy generate, in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # answers of any length, as the bare engine gives

    def generate(self, prompt: list[int], num_output: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_output,
            do_sample=False,
        )
        return list(out[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocab]."""
        logits: torch.Tensor = self.model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits

    def assert_continued(self, sequence: Sequence) -> None:
        """The output equals generate's; if not, says where, and how close the two best logits were there."""
        prompt, output = (
            sequence.token_ids[: sequence.num_prompt_tokens],
            sequence.token_ids[sequence.num_prompt_tokens :],
        )
        wanted = self.generate(prompt, len(output))
        if output != wanted:
            at = next(i for i, (a, b) in enumerate(zip(output, wanted, strict=True)) if a != b)
            best = self.logits(prompt + wanted[:at])[-1].topk(2).values.tolist()
            raise AssertionError(
                f"prompt of {len(prompt)}: output token {at} is {output[at]}, generate's {wanted[at]}; "
                f"the two best logits there are {best[0] - best[1]:.2e} apart"
            )
