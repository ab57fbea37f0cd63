"""Whole passes for benchmarks/native_products.py: batches over one cache, and the ways to compute them."""

import random
from collections.abc import Callable

from distserve.engine.attention import attention_backend
from distserve.engine.batching import Batch, Work
from distserve.engine.context import BatchContext
from distserve.engine.loaded import LoadedModel
from distserve.engine.native.model import NativeModel
from distserve.engine.paged_cache import PagedCache
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.messages import SamplingParams, SequenceKey, num_blocks_for

NUM_BLOCKS = 1500

# (tokens in the cache, tokens to compute) of each sequence.
PASSES = {
    "prompt of 16": [(0, 16)],
    "prompt of 64": [(0, 64)],
    "prompt of 128": [(0, 128)],
    "prompt of 256": [(0, 256)],
    "prompt of 512": [(0, 512)],
    "256 more after 256": [(256, 256)],
    "step, 1 x 128": [(128, 1)],
    "step, 1 x 512": [(512, 1)],
    "steps, 4 x 512": [(512, 1)] * 4,
    "steps, 16 x 128": [(128, 1)] * 16,
    "steps, 16 x 512": [(512, 1)] * 16,
    "steps, 32 x 128": [(128, 1)] * 32,
    "16 steps, prompt of 128": [(128, 1)] * 16 + [(0, 128)],
}


class Bench:
    """Blocks of each sequence lie scattered; what is in the cache are random numbers."""

    def __init__(self, model: LoadedModel, native: NativeModel) -> None:
        self._model = model
        self._native = native
        self._cache = PagedCache(model.layout, NUM_BLOCKS)
        self._cache.pool.normal_()
        self._runner = ModelRunner(model, self._cache)
        self._free = random.Random(5).sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)

    def sides(self, specs: list[tuple[int, int]]) -> dict[str, Callable[[], None]]:
        """The model's own code; compiled, with torch's products and its attention of chunks; compiled as workers do."""

        def own() -> None:
            self._runner._own_hidden(self._context(specs))

        def by_torch() -> None:
            self._native.hidden_of_many(self._context(specs))

        def compiled() -> None:
            self._native.hidden(self._context(specs))

        return {"own": own, "torch's products": by_torch, "compiled": compiled}

    def _context(self, specs: list[tuple[int, int]]) -> BatchContext:
        free, work = iter(self._free), []
        for number, (start, count) in enumerate(specs):
            length = start + count
            tokens = [7919 * (number + 1) * (at + 3) % self._model.vocab_size for at in range(length)]
            blocks = [next(free) for _ in range(num_blocks_for(length, self._cache.block_size))]
            sampling = SamplingParams(max_tokens=8)
            sequence = Sequence(SequenceKey(f"bench{number}"), tokens, length, sampling, block_table=blocks)
            work.append(Work(sequence, start, count, True))
        return BatchContext.build(Batch(work), self._cache, attention_backend("sdpa", self._cache.layout, "cpu"))
