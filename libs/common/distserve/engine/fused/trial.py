"""Whether fused passes give what the model's own code gives: tried once, on a small pool of their own."""

from __future__ import annotations

import logging

import torch

from distserve.engine.attention.base import AttentionBackend
from distserve.engine.batching import Batch, Work
from distserve.engine.context import BatchContext
from distserve.engine.fused.model import FusedModel
from distserve.engine.loaded import LoadedModel
from distserve.engine.native.build import NativeUnavailable
from distserve.engine.native.loader import TOLERANCE, worst_difference
from distserve.engine.paged_cache import PagedCache
from distserve.engine.sequence import Sequence
from distserve.messages import SamplingParams, SequenceKey

log = logging.getLogger(__name__)

NUM_TOKENS = 96


@torch.inference_mode()
def fused_model(loaded: LoadedModel, backend: AttentionBackend) -> FusedModel | None:
    """None, said in the log, where the model's own code goes on: a model of another kind, or another outcome."""
    own = _passes(loaded, backend, None)
    try:
        fused = FusedModel(loaded)
    except NativeUnavailable as e:
        log.info("passes of %s run as the model's own code: %s", loaded.name, e)
        return None
    difference = max(
        worst_difference(ours, theirs) for ours, theirs in zip(_passes(loaded, backend, fused), own, strict=True)
    )
    if difference > TOLERANCE[loaded.dtype]:
        log.warning("passes of %s run as its own code: fused ones are off by %.1e", loaded.name, difference)
        return None
    log.info("passes of %s run fused", loaded.name)
    return fused


def _passes(loaded: LoadedModel, backend: AttentionBackend, fused: FusedModel | None) -> list[torch.Tensor]:
    """Hidden states of two chunks of a made-up prompt and of a step after it."""
    size = loaded.layout.block_size
    num_blocks = -(-(NUM_TOKENS + 1) // size)
    cache = PagedCache(loaded.layout, num_blocks + 1, loaded.device)
    ids = [(7919 * (at + 3)) % loaded.vocab_size for at in range(NUM_TOKENS + 1)]
    sequence = Sequence(
        SequenceKey("trial"), ids, NUM_TOKENS, SamplingParams(max_tokens=2), block_table=list(range(1, num_blocks + 1))
    )
    chunk = max(size, NUM_TOKENS // 2 // size * size)
    found = []
    for start, stop in ((0, chunk), (chunk, NUM_TOKENS), (NUM_TOKENS, NUM_TOKENS + 1)):
        if start >= stop:
            continue
        context = BatchContext.build(Batch([Work(sequence, start, stop - start, samples=False)]), cache, backend)
        if fused is not None:
            found.append(fused.hidden(context))
            continue
        hidden = loaded.base(
            input_ids=context.token_ids, position_ids=context.positions, use_cache=False, paged=context
        )[0][0]
        found.append(hidden)
    return found
