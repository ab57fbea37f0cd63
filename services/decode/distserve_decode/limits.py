"""What a decode worker takes."""

from dataclasses import dataclass

from distserve.engine.sequence import Sequence
from distserve.errors import InvalidRequest
from distserve.messages import num_blocks_for


@dataclass(frozen=True, slots=True)
class Limits:
    """max_local_prefill_tokens: of a prompt, those that it computes itself at most. (A colocated one computes any, and
    so does one where no prefill worker is.) block_bytes: of a KV block; 0: what is preempted is never given away."""

    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_waiting: int
    block_size: int
    colocated: bool
    max_local_prefill_tokens: int = 0
    block_bytes: int = 0

    def check_fits(self, sequence: Sequence, num_blocks: int) -> None:
        """Raises InvalidRequest if, at its longest, it needs more than a pool of so many blocks."""
        largest = min(self.max_model_len, sequence.num_prompt_tokens + sequence.sampling.max_tokens)
        if num_blocks_for(largest, self.block_size) > num_blocks:
            raise InvalidRequest(
                f"prompt and max_tokens make {largest} tokens, the {num_blocks} KV blocks here hold "
                f"{num_blocks * self.block_size}: raise kv.num_blocks or lower max_tokens",
                param="max_tokens",
            )
