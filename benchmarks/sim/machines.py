"""What passes take: the figures that a simulation reckons with."""

from __future__ import annotations

from dataclasses import dataclass

from distserve.messages import PassSpeed, pairs

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """A prefill worker's passes and a decode worker's, and the limits that they run with."""

    name: str
    prefill: PassSpeed
    decode: PassSpeed
    max_batch_tokens: int = 4096
    chunk_tokens: int = 512
    max_num_seqs: int = 64

    def work_s(self, num_tokens: int) -> float:
        """What a prompt takes of passes that are as full as may be."""
        return self.prefill.seconds(num_tokens, pairs(num_tokens, 0)) + self.prefill.pass_s * (
            num_tokens / self.max_batch_tokens - 1
        )

    def alone_s(self, num_tokens: int) -> float:
        """To the first token on an idle worker."""
        return self.prefill.prefill_s(num_tokens, 0, self.chunk_tokens or self.max_batch_tokens)


# Fitted to the one-thread figures of RESULTS.md, "Where a decode step goes" (matrix tiles): prompts of 128, 512 and
# 2,048, steps of 1 x 128, 4 x 512, 16 x 512 and 32 x 128.
SMOLLM2 = Machine(
    "smollm2",
    prefill=PassSpeed(pass_s=6.6e-3, token_s=5.3e-4, pair_s=2.7e-7),
    decode=PassSpeed(pass_s=23.6e-3, token_s=2.8e-4, pair_s=3.5e-6),
    max_num_seqs=32,
)

# Reckoned, not measured: 8e9 weights in bf16, 32 layers of 4,096, 8 KV heads of 128, on a GPU that reads 2.6 TB/s and
# computes 400 TFLOP/s (300 in attention). A pass reads the weights (16 GB); a token of a prompt is 16 GFLOP, a pair
# 0.5 MFLOP; a step's token reads 128 KiB for each that it attends to.
GPU_8B = Machine(
    "8b-gpu",
    prefill=PassSpeed(pass_s=6e-3, token_s=4e-5, pair_s=1.7e-9),
    decode=PassSpeed(pass_s=6.5e-3, token_s=2e-5, pair_s=5e-8),
    max_batch_tokens=8192,
    max_num_seqs=256,
)

MACHINES = {m.name: m for m in (SMOLLM2, GPU_8B)}
