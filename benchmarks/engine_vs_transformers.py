"""The engine against transformers' own forward with a DynamicCache: same weights, same process, taken in turns.

    python benchmarks/engine_vs_transformers.py [--model FOLDER] [--dtype bfloat16] [--threads 1] [--clock wall]

Without --model, a random model of SmolLM2-135M's shape. Prefill: one prompt into an empty cache. Decode: steps of a
batch whose sequences all hold --context tokens (equal lengths need no padding: transformers' best case). The engine's
time includes block tables, masks and the sampler; transformers' the forward, the cache and argmax. In every round both
do every case, in alternating order; figures are medians over rounds with the quartiles. A ratio is the median of the
rounds' ratios, engine / transformers: below 1 the engine is faster.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from distserve.engine.batching import Batch, Work
from distserve.engine.model import load_model
from distserve.engine.paged_cache import PagedCache
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.messages import SamplingParams, SequenceKey, num_blocks_for

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
GREEDY = SamplingParams(max_tokens=1_000_000, temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder in Hugging Face format")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], help="prompt lengths, tokens")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 4, 16], help="batch sizes")
    parser.add_argument("--context", type=int, default=512, help="tokens that each decoding sequence holds")
    parser.add_argument("--steps", type=int, default=8, help="decode steps a round")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor time, for one thread on a machine that does other work too",
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = CLOCKS[arguments.clock]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or random_smollm2(Path(scratch))
        figures = compare(folder, arguments, clock)
    for row in figures["cases"]:
        print(
            f"{row['case']:>16}  engine {spread(row['engine_ms'])}  transformers {spread(row['transformers_ms'])}"
            f"  ratio {statistics.median(row['ratios']):.3f} ({min(row['ratios']):.3f}-{max(row['ratios']):.3f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


def random_smollm2(folder: Path) -> Path:
    """Random weights in the shape of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def compare(folder: Path, arguments: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    loaded = load_model(folder, dtype=arguments.dtype)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.dtype)).eval()
    longest = max([*arguments.prefill, arguments.context + arguments.steps + 1])
    per_sequence = num_blocks_for(longest, loaded.layout.block_size)
    num_blocks = 1 + per_sequence * max([*arguments.decode, 1])
    cache = PagedCache(loaded.layout, num_blocks)
    runner = ModelRunner(loaded, cache)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)).add(1).tolist()
    tables = [order[i * per_sequence : (i + 1) * per_sequence] for i in range(max([*arguments.decode, 1]))]
    cases: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {}
    for length in arguments.prefill:
        ids = draw_ids(1, length, loaded.vocab_size)
        cases[f"prefill {length}"] = (engine_prefill(runner, ids, tables, clock), stock_prefill(stock, ids, clock))
    for batch in arguments.decode:
        ids = draw_ids(batch, arguments.context, loaded.vocab_size)
        steps = arguments.steps
        cases[f"decode batch {batch}"] = (
            engine_decode(runner, ids, tables, steps, clock),
            stock_decode(stock, ids, steps, clock),
        )
    figures: dict[str, tuple[list[float], list[float]]] = {case: ([], []) for case in cases}
    for turn in range(arguments.rounds + 1):  # the first warms up
        for case, sides in cases.items():
            for side in (0, 1) if turn % 2 else (1, 0):
                seconds = sides[side]()
                if turn:
                    figures[case][side].append(seconds * 1000)
    return {
        "conditions": {
            "model": str(arguments.model or "random, shape of SmolLM2-135M"),
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "clock": arguments.clock,
            "context": arguments.context,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "processor": processor(),
        },
        "cases": [
            {
                "case": case,
                "engine_ms": engine,
                "transformers_ms": theirs,
                "ratios": [a / b for a, b in zip(engine, theirs, strict=True)],
            }
            for case, (engine, theirs) in figures.items()
        ],
    }


def engine_prefill(
    runner: ModelRunner, ids: torch.Tensor, tables: list[list[int]], clock: Clock
) -> Callable[[], float]:
    def run() -> float:
        (sequence,) = sequences(ids, tables)
        begin = clock()
        runner.execute(Batch([Work(sequence, 0, len(sequence.token_ids), True)]))
        return clock() - begin

    return run


def engine_decode(
    runner: ModelRunner, ids: torch.Tensor, tables: list[list[int]], steps: int, clock: Clock
) -> Callable[[], float]:
    running = sequences(ids, tables)
    for sequence in running:
        execute(runner, [sequence])
    length = len(running[0].token_ids)

    def run() -> float:
        for sequence in running:
            del sequence.token_ids[length:]
            sequence.num_computed_tokens = length - 1
        begin = clock()
        for _ in range(steps):
            execute(runner, running)
        return (clock() - begin) / steps

    return run


def execute(runner: ModelRunner, running: list[Sequence]) -> None:
    batch = Batch([Work(s, s.num_computed_tokens, s.num_uncomputed_tokens, True) for s in running])
    for sampled in runner.execute(batch):
        sampled.sequence.num_computed_tokens = len(sampled.sequence.token_ids)
        sampled.sequence.token_ids.append(sampled.token_id)


def stock_prefill(model: Any, ids: torch.Tensor, clock: Clock) -> Callable[[], float]:
    @torch.inference_mode()
    def run() -> float:
        begin = clock()
        model(ids, **with_cache(model, DynamicCache(config=model.config)), logits_to_keep=1).logits.argmax(-1)
        return clock() - begin

    return run


def stock_decode(model: Any, ids: torch.Tensor, steps: int, clock: Clock) -> Callable[[], float]:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        first = model(ids, **with_cache(model, cache), logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)

    @torch.inference_mode()
    def run() -> float:
        if (extra := cache.get_seq_length() - ids.shape[1]) > 0:
            cache.crop(-extra)
        token = first
        begin = clock()
        for _ in range(steps):
            token = model(token, **with_cache(model, cache)).logits[:, -1].argmax(-1, keepdim=True)
        return (clock() - begin) / steps

    return run


def with_cache(model: Any, cache: DynamicCache) -> dict[str, Any]:
    """The cache under the name that this release of transformers gives it."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}


def sequences(ids: torch.Tensor, tables: list[list[int]]) -> list[Sequence]:
    return [
        Sequence(SequenceKey(f"bench-{i}"), row, len(row), GREEDY, block_table=list(tables[i]))
        for i, row in enumerate(ids.tolist())
    ]


def draw_ids(batch: int, length: int, vocab_size: int) -> torch.Tensor:
    return torch.randint(3, vocab_size, (batch, length), generator=torch.Generator().manual_seed(length + batch))


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:8.1f} ms ({low:.1f}-{high:.1f})"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
