"""A pass of each kind before the first request, so that it pays for no first-time work in kernels and allocators."""

from distserve.engine.batching import Batch, Work
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import SamplingParams, SequenceKey


def warm_up(runner: ModelRunner, pool: BlockPool, *, num_sequences: int = 2, num_tokens: int = 64) -> None:
    """Prefill and two decode steps of a few made-up sequences, greedy and drawn. Leaves the pool as it was.

    Their tokens differ, so that a forward pass in compiled code that is tried here has something to get wrong.
    """
    block_size = runner.cache.block_size
    per_sequence = -(-(num_tokens + 3) // block_size)
    num_sequences = min(num_sequences, pool.num_free // per_sequence)
    sequences = [
        Sequence(
            SequenceKey("warm-up", i),
            [(7919 * (i + 1) * (at + 3)) % runner.model.vocab_size for at in range(num_tokens)],
            num_tokens,
            SamplingParams(max_tokens=4, temperature=float(i % 2), top_p=0.9),
            block_table=pool.allocate(per_sequence),
        )
        for i in range(num_sequences)
    ]
    try:
        for _ in range(3):
            work = [Work(s, s.num_computed_tokens, s.num_uncomputed_tokens, samples=True) for s in sequences]
            for sampled in runner.execute(Batch(work)):
                sampled.sequence.num_computed_tokens = len(sampled.sequence.token_ids)
                sampled.sequence.token_ids.append(max(0, sampled.token_id))
    finally:
        for sequence in sequences:
            pool.free(sequence.block_table)
