"""The engine's passes on one GPU: decode steps and prefill at the shape of Llama-3-8B with random weights, bf16.

    python -m benchmarks.gpu_engine [--layers 32] [--json FILE] [--parts decode prefill]

Needs a CUDA device and Triton. Decode: ModelRunner.execute() of a batch of steps, wall time of whole passes (inputs,
launch, tokens read back), median of many; and the device's time of the recorded step alone. Prefill: execute() of one
prompt without a prefix. Floors: the bytes of weights and KV over the measured bandwidth of a device-to-device copy
(read + write), the operations over the rate of a large matrix product measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from distserve.engine.batching import Batch, Work
from distserve.engine.loaded import LoadedModel
from distserve.engine.paged_cache import PagedCache
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.messages import KVLayout, SamplingParams, SequenceKey

BLOCK_SIZE = 16
DECODE = ((1, 1024), (32, 1024), (128, 1024), (32, 8000))
PREFILL = (512, 2048, 8192)
MAX_LEN = 20_000


def llama_8b(num_layers: int) -> LoadedModel:
    """Of the shape of Llama-3-8B, with weights drawn at random on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from distserve.engine.attention.hook import IMPLEMENTATION, register

    register()
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        dtype="bfloat16",
    )
    config._attn_implementation = IMPLEMENTATION
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model = model.to_empty(device="cuda").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    model.model.rotary_emb = LlamaRotaryEmbedding(config, device="cuda")
    layout = KVLayout(
        weights="random",
        dtype="bfloat16",
        num_layers=num_layers,
        num_kv_heads=8,
        head_dim=128,
        block_size=BLOCK_SIZE,
        rope="{}",
    )
    return LoadedModel(
        model, model.model, layout, MAX_LEN, (), 128256, 4096, "llama-8b", "bfloat16", torch.device("cuda")
    )


class Rig:
    def __init__(self, num_layers: int) -> None:
        self.model = llama_8b(num_layers)
        num_blocks = max(n * -(-(context + 300) // BLOCK_SIZE) for n, context in DECODE) + 700
        self.cache = PagedCache(self.model.layout, num_blocks, "cuda")
        self.cache.pool.normal_(0, 0.5)
        self.runner = ModelRunner(self.model, self.cache)
        self.runner.fuse()
        began = time.monotonic()
        self.runner.record_steps(128, MAX_LEN)
        self.record_s = time.monotonic() - began
        self.num_weights = sum(p.numel() for p in self.model.model.parameters())

    def sequences(self, n: int, context: int, room: int = 0) -> list[Sequence]:
        """With blocks for `room` tokens more."""
        free = torch.randperm(self.cache.num_blocks - 1).add_(1).tolist()
        found = []
        for i in range(n):
            blocks = [free.pop() for _ in range(-(-(context + room) // BLOCK_SIZE))]
            ids = torch.randint(10, 120_000, (context,)).tolist()
            found.append(
                Sequence(
                    SequenceKey(f"r{i}"),
                    ids,
                    context,
                    SamplingParams(max_tokens=10_000, temperature=0.0, ignore_eos=True),
                    block_table=blocks,
                )
            )
        return found

    def decode(self, n: int, context: int, num_steps: int = 60) -> dict[str, float]:
        """ms of a step."""
        sequences = self.sequences(n, context, room=num_steps + 20)
        for s in sequences:
            s.num_computed_tokens = context - 1
        walls = []
        for step in range(num_steps + 10):
            batch = Batch([Work(s, s.num_computed_tokens, 1, samples=True) for s in sequences])
            began = time.perf_counter()
            results = self.runner.execute(batch)
            took = time.perf_counter() - began
            for result in results:
                result.sequence.token_ids.append(max(0, result.token_id))
                result.sequence.num_computed_tokens += 1
            if step >= 10:
                walls.append(took * 1e3)
        walls.sort()
        steps = self.runner._steps
        assert steps is not None
        recording = steps._recordings[next(size for size in steps._sizes if size >= n)]
        return {
            "wall_ms": walls[len(walls) // 2],
            "wall_p99_ms": walls[int(len(walls) * 0.99)],
            "device_ms": device_ms(recording.graph.replay),
            "floor_ms": self.decode_floor_ms(n, context),
        }

    def decode_floor_ms(self, n: int, context: int) -> float:
        layout = self.model.layout
        embedding = self.model.vocab_size * self.model.hidden_size
        kv = n * context * layout.num_kv_heads * layout.head_dim * 2 * layout.num_layers
        return 2 * (self.num_weights - embedding + kv) / copy_bandwidth() * 1e3

    def prefill(self, n: int) -> dict[str, float]:
        walls = []
        for attempt in range(9):
            [sequence] = self.sequences(1, n)
            began = time.perf_counter()
            self.runner.execute(Batch([Work(sequence, 0, n, samples=True)]))
            if attempt >= 3:
                walls.append((time.perf_counter() - began) * 1e3)
        walls.sort()
        layout, hidden = self.model.layout, self.model.hidden_size
        embeddings = 2 * self.model.vocab_size * hidden
        operations = 2 * (self.num_weights - embeddings) * n + layout.num_layers * 2 * 2 * n * n * 4096 / 2
        wall_ms = walls[len(walls) // 2]
        return {"wall_ms": wall_ms, "tflops": operations / wall_ms / 1e9, "peak_tflops": product_rate() / 1e12}


def device_ms(call: Any, times: int = 30) -> float:
    """Median, by events."""
    for _ in range(3):
        call()
    spans = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in spans)[times // 2]


_known: dict[str, float] = {}


def copy_bandwidth() -> float:
    """Bytes a second, read and written."""
    if "copy" not in _known:
        x = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
        y = torch.empty_like(x)
        _known["copy"] = 2 * x.numel() / device_ms(lambda: y.copy_(x), 10) * 1e3
    return _known["copy"]


def product_rate() -> float:
    """Operations a second, of bf16 on random numbers."""
    if "product" not in _known:
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        _known["product"] = 2 * 8192**3 / device_ms(lambda: a @ b, 10) * 1e3
    return _known["product"]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--parts", nargs="+", choices=["decode", "prefill"], default=["decode", "prefill"])
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    rig = Rig(a.layers)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layers": a.layers,
        "record_s": rig.record_s,
        "copy_TBps": copy_bandwidth() / 1e12,
    }
    print(found, flush=True)
    if "decode" in a.parts:
        for n, context in DECODE:
            row = rig.decode(n, context)
            found[f"decode {n} x {context}"] = row
            print(
                f"decode {n:4} x {context:5}: wall {row['wall_ms']:.2f} ms (P99 {row['wall_p99_ms']:.2f}), device "
                f"{row['device_ms']:.2f}, floor {row['floor_ms']:.2f}, ratio {row['wall_ms'] / row['floor_ms']:.2f}",
                flush=True,
            )
    if "prefill" in a.parts:
        for n in PREFILL:
            row = rig.prefill(n)
            found[f"prefill {n}"] = row
            print(
                f"prefill {n:5}: {row['wall_ms']:.1f} ms, {row['tflops']:.0f} of {row['peak_tflops']:.0f} TFLOP/s",
                flush=True,
            )
    if a.json:
        a.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
