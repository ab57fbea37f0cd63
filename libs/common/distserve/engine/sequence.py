"""The engine's view of one running request output."""

from dataclasses import dataclass, field

from distserve.kv.hashing import Chain
from distserve.messages import SamplingParams, SequenceKey, num_blocks_for


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Tokens known so far, how many of them have KV, and where that KV lies.

        token_ids  |<- prompt: num_prompt_tokens ->|<- output ->|
        KV         |<- num_computed_tokens ->|  the rest is computed by coming steps

    A decode step has len(token_ids) - num_computed_tokens == 1. `block_table[i]` holds KV of tokens
    [i*block_size, (i+1)*block_size). The blocks are owned by the sequence from allocation to release; only the
    worker's loop changes them.
    """

    key: SequenceKey
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, those whose KV was not computed for this sequence: prefix hits
    chain: Chain | None = None  # its full blocks' names, as far as they are known; None: its blocks are not shared
    num_named_blocks: int = 0  # from the first on, those that the pool has been told the names of

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def blocks_missing(self, num_tokens: int, block_size: int) -> int:
        """Blocks to allocate before KV of the first num_tokens tokens can be written."""
        return max(0, num_blocks_for(num_tokens, block_size) - len(self.block_table))
