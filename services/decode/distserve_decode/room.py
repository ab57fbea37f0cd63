"""Whether one more sequence may begin: seats, and KV blocks with what those that run are expected to grow by.

Pure arithmetic over the pool's books: it takes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import num_blocks_for
from distserve_decode.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Bound:
    """What is held for sequences that don't run yet: seats, and the blocks that they are expected to take beyond those
    that they have."""

    num_seats: int = 0
    num_blocks: int = 0


NOTHING = Bound()


class Room:
    def __init__(
        self, pool: BlockPool, lengths: Lengths, *, block_size: int, max_num_seqs: int, foresees: bool = True
    ) -> None:
        """foresees: growth counts. Else a sequence begins wherever it fits with one block more."""
        self._pool = pool
        self._lengths = lengths
        self._block_size = block_size
        self._foresees = foresees
        self.max_num_seqs = max_num_seqs
        self.running: list[Sequence] = []  # the scheduler's
        self.coming: list[Sequence] = []  # preempted, and have their seats again: their blocks are being fetched
        self.bound: Callable[[], Bound] = lambda: NOTHING  # for hand-overs under way

    @property
    def num_seats(self) -> int:
        """That are free; below 0 if more run than should."""
        return self.max_num_seqs - len(self.running) - len(self.coming) - self.bound().num_seats

    def needs(self, sequence: Sequence) -> int:
        """Blocks for what it has, if nothing of it is found."""
        return num_blocks_for(len(sequence.token_ids), self._block_size)

    def growth(self, sequence: Sequence) -> int:
        """Blocks that it is expected to take beyond those that it has, or, where it has none, that it needs now."""
        expected = self._lengths.expected(sequence.num_output_tokens, sequence.sampling.max_tokens)
        in_all = num_blocks_for(sequence.num_prompt_tokens + expected, self._block_size)
        return max(0, in_all - max(len(sequence.block_table), self.needs(sequence)))

    def newcomers_growth(self, num_tokens: int, max_new_tokens: int) -> int:
        """The same for one that is to come, with so many tokens. max_new_tokens: that it may generate; 0: not said."""
        if not self._foresees or not (max_new_tokens or self._lengths.known):
            return 0
        expected = self._lengths.expected(1, max_new_tokens or self._pool.num_total * self._block_size)
        return num_blocks_for(num_tokens + expected, self._block_size) - num_blocks_for(num_tokens, self._block_size)

    def spare(self, growth: int) -> int:
        """Blocks that must stay free beside those that a newcomer gets now, if it is expected to take `growth` more. 0
        where nothing runs: alone, whatever fits the pool can end."""
        bound = self.bound()
        if not (self.running or self.coming or bound.num_seats):
            return 0
        if not self._foresees:
            return 1 if self.running else 0
        held = sum(self.growth(s) for s in self.running) + sum(self.needs(s) + self.growth(s) for s in self.coming)
        return growth + bound.num_blocks + held

    def fits(self, sequence: Sequence) -> bool:
        """It may begin, whatever is found of it."""
        return self.needs(sequence) + self.spare(self.growth(sequence)) <= self._pool.num_available
