"""What a pause alone costs the next decode step: no hand-over, no other process, one sequence of 512 tokens.

    python -m benchmarks.rested_step [--model FOLDER] [--pause 0.35] [--rounds 12]

A decode worker that has nothing to do finds its weights out of the caches when a sequence arrives. A single process
that has just prefilled does not. benchmarks/handover.py measures both, so this is the part of its figure that is not
the hand-over's.
"""

import argparse
import os
import statistics
import time

import torch

from distserve.engine.batching import Batch, Work
from distserve.engine.model import load_model
from distserve.engine.paged_cache import PagedCache
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.messages import SamplingParams, SequenceKey
from distserve.models import resolve

PROMPT = 512
STEPS_AFTER = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pause", type=float, default=0.35, help="seconds, about the prefill of 512 tokens")
    parser.add_argument("--rounds", type=int, default=12)
    a = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    model = load_model(resolve(a.model))
    num_blocks = (PROMPT + 2 * a.rounds * (1 + STEPS_AFTER)) // 16 + 3
    runner = ModelRunner(model, PagedCache(model.layout, num_blocks + 1))
    sampling = SamplingParams(max_tokens=10_000, temperature=0)
    sequence = Sequence(
        SequenceKey("bench"), [5] * PROMPT, PROMPT, sampling, block_table=list(range(1, num_blocks + 1))
    )

    def step() -> float:
        began = time.perf_counter()
        work = Work(sequence, sequence.num_computed_tokens, sequence.num_uncomputed_tokens, samples=True)
        (sampled,) = runner.execute(Batch([work]))
        took = time.perf_counter() - began
        sequence.num_computed_tokens = len(sequence.token_ids)
        sequence.token_ids.append(sampled.token_id)
        return 1e3 * took

    step()
    first: dict[bool, list[float]] = {False: [], True: []}
    later: list[float] = []
    for _ in range(a.rounds):
        for pauses in (False, True):
            if pauses:
                time.sleep(a.pause)
            first[pauses].append(step())
            later += [step() for _ in range(STEPS_AFTER)]
    rested, steady = statistics.median(first[True]), statistics.median(first[False] + later)
    print(f"decode step: {steady:.1f} ms, after a pause of {a.pause} s {rested:.1f} ms ({rested - steady:+.1f})")


if __name__ == "__main__":
    main()
