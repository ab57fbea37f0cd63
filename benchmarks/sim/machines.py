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

# Fitted to RESULTS.md, "The engine on a GPU" (a Llama of 8 billion weights, bf16, one H200): prompts of 512, 2,048 and
# 8,192, steps of 1, 32 and 128 x 1,024 and 32 x 8,000.
GPU_8B = Machine(
    "8b-gpu",
    prefill=PassSpeed(pass_s=2.95e-3, token_s=2.18e-5, pair_s=1.43e-9),
    decode=PassSpeed(pass_s=4.83e-3, token_s=8.8e-6, pair_s=3.1e-8),
    max_batch_tokens=8192,
    max_num_seqs=256,
)

MACHINES = {m.name: m for m in (SMOLLM2, GPU_8B)}
