"""Beginnings of prompts that this worker's own pool holds: found before a prompt starts, named as one is computed."""

from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.kv.hashing import Chain
from distserve.kv.layout import fingerprint
from distserve.messages import KVLayout, SequenceState, SubmitRequest, num_blocks_for


class Prefixes:
    """Belongs to the event loop, as the pool does.

    token_ids    |<- block 0 ->|<- block 1 ->|<- block 2 ->|<- rest ->|
    chain        |   hash 0    |   hash 1    |   hash 2    |
    a hit        |<- computed by another, or fetched ->|    never the last token: its logits are wanted
    """

    def __init__(self, pool: BlockPool, layout: KVLayout, *, keep: bool) -> None:
        """keep: kv.prefix_cache; without it there are no chains, so no hits and no names."""
        self._pool = pool
        self._block_size = layout.block_size
        self._fingerprint = fingerprint(layout) if keep else ""
        self.num_tokens = 0  # of prompts that were begun
        self.num_cached_tokens = 0  # of those, had from the pool

    def chain_of(self, request: SubmitRequest | SequenceState) -> Chain | None:
        """The names of its full blocks; None if nothing is shared."""
        if not self._fingerprint or request.cache_salt is None:
            return None
        chain = Chain(self._block_size, self._fingerprint, request.cache_salt)
        chain.extend(request.token_ids)
        return chain

    def wanted(self, sequence: Sequence) -> list[bytes]:
        """The names of blocks that need not be computed if they are had: whole ones, without the one that holds the
        last token. None where logprobs of the prompt are still to come: from its every token's hidden state."""
        if sequence.chain is None or (sequence.sampling.prompt_logprobs is not None and not sequence.num_output_tokens):
            return []
        return sequence.chain.hashes[: (len(sequence.token_ids) - 1) // self._block_size]

    def num_held_tokens(self, sequence: Sequence) -> int:
        """Of its beginning, those that admit() would find."""
        return len(self._pool.find(self.wanted(sequence))) * self._block_size

    def admit(self, sequence: Sequence, *, spare: int = 0) -> bool:
        """Its turn has come: it has blocks for all of it from now on, those that hold its beginning and new ones for
        the rest. False, and it has none, if there is no room for it and `spare` blocks more."""
        hits = self._pool.find(self.wanted(sequence))
        self._pool.acquire(hits)  # before the room is counted: they are not part of it
        missing = num_blocks_for(len(sequence.token_ids), self._block_size) - len(hits)
        if missing + spare > self._pool.num_available:
            self._pool.free(hits)
            return False
        sequence.block_table = hits + self._pool.allocate(missing)
        sequence.num_named_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self._block_size
        if not sequence.num_preemptions:  # else what it finds may be its own
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        return True

    def note_begun(self, sequence: Sequence) -> None:
        self.num_tokens += sequence.num_prompt_tokens
        self.num_cached_tokens += sequence.num_cached_tokens

    def name(self, sequence: Sequence) -> None:
        """All that is computed of it is right: its full blocks can be found from now on."""
        start, stop = sequence.num_named_blocks, sequence.num_computed_tokens // self._block_size
        if sequence.chain is None or stop <= start:
            return
        sequence.chain.extend(sequence.token_ids)
        blocks, names = sequence.block_table[start:stop], sequence.chain.hashes[start:stop]
        self._pool.name(blocks, names, sequence.chain.parent_of(start))
        sequence.num_named_blocks = stop

    def forget(self, sequence: Sequence) -> None:
        """What it computed from is wrong, its prefix hits perhaps: none of its blocks is found again, or offered."""
        self._pool.forget(sequence.block_table[: sequence.num_named_blocks])
        sequence.chain, sequence.num_named_blocks = None, 0
