"""Does our way of running a model give what the model's own way gives? Asked once, at load.

Some models take positions from the length of the input, or mask in ways of their own; in a ragged batch their tokens
would be silently wrong. Two short sequences, cut into chunks and mixed, show it.
"""

from __future__ import annotations

import torch

from distserve.engine.batching import Batch, Work
from distserve.engine.loaded import LoadedModel
from distserve.engine.paged_cache import PagedCache
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.errors import ModelUnsupported
from distserve.messages import SamplingParams, SequenceKey, num_blocks_for

# Largest |ours - theirs| / |theirs|. Rounding stays far below; a token out of place is of the order of 1.
TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.25}
LENGTHS = (23, 7)
# What the two sequences compute in each pass: chunks with and without a prefix, then a decode step.
PASSES = ((9, 4), (13, 3), (1, 0))


@torch.inference_mode()
def require_agreement(loaded: LoadedModel) -> None:
    """Raises ModelUnsupported if logits after the last tokens are not those of the model's eager attention."""
    vocab = min(loaded.vocab_size, 1000)
    prompts = [[(7919 * (i + 1) * (n + 3)) % vocab for i in range(length)] for n, length in enumerate(LENGTHS)]
    try:
        theirs = [_stock_logits(loaded, prompt) for prompt in prompts]
        ours = _paged_logits(loaded, prompts)
    except (TypeError, ValueError, AttributeError, RuntimeError, KeyError, IndexError) as e:
        feature = f"code that fails under paged attention ({type(e).__name__}: {e})"
        raise ModelUnsupported(f"{loaded.name} has {feature}", model=loaded.name, feature=feature) from e
    for mine, stock in zip(ours, theirs, strict=True):
        error = float((mine - stock).norm() / stock.norm())
        if not error <= TOLERANCE[loaded.dtype]:
            feature = "attention or positions that a ragged batch with a paged cache does not reproduce"
            raise ModelUnsupported(
                f"{loaded.name} has {feature}: logits are off by {error:.1e}, {TOLERANCE[loaded.dtype]} is allowed",
                model=loaded.name,
                feature=feature,
            )


def _stock_logits(loaded: LoadedModel, prompt: list[int]) -> torch.Tensor:
    """[vocab_size], float32, after the prompt."""
    ours = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = loaded.model(torch.tensor([prompt], device=loaded.device), use_cache=False).logits
    finally:
        loaded.model.set_attn_implementation(ours)
    return logits[0, -1].float()


def _paged_logits(loaded: LoadedModel, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The same for each prompt, computed in PASSES."""
    blocks = [num_blocks_for(len(p), loaded.layout.block_size) for p in prompts]
    cache = PagedCache(loaded.layout, sum(blocks) + 1, loaded.device)
    try:
        runner = ModelRunner(loaded, cache)
        free = list(range(1, sum(blocks) + 1))  # taken from the end: tables run backwards
        sequences = [
            Sequence(
                SequenceKey(f"probe-{i}"), p, len(p), SamplingParams(max_tokens=1), 0, [free.pop() for _ in range(n)]
            )
            for i, (p, n) in enumerate(zip(prompts, blocks, strict=True))
        ]
        found: dict[int, torch.Tensor] = {}
        for sizes in PASSES:
            batch = Batch()
            for sequence, num in zip(sequences, sizes, strict=True):
                if num:
                    ends = sequence.num_computed_tokens + num == len(sequence.token_ids)
                    batch.work.append(Work(sequence, sequence.num_computed_tokens, num, ends))
            logits = runner.forward_logits(batch)
            for row, work in enumerate(w for w in batch.work if w.samples):
                found[id(work.sequence)] = logits[row].float()
            for work in batch.work:
                work.sequence.num_computed_tokens += work.num_tokens
        return [found[id(s)] for s in sequences]
    finally:
        cache.close()
