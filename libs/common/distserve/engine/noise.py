"""The noise that picks tokens: one Gumbel draw for every (seed, position, stream, vocabulary id).

Adding standard Gumbel noise to log-probabilities and taking the largest draws from the distribution (the Gumbel-max
trick; Maddison, Tarlow and Minka, "A* sampling", 2014). A Gumbel draw is minus the logarithm of an exponential one,
so the largest score belongs to the smallest exponential. Ids lie in blocks of 64, and the noise of a block is drawn
from the top: first its smallest exponential e/64 (the minimum of 64 has rate 64) and the slot that has it; every
other id has e/64 plus a draw of its own, since exponentials are memoryless. All 64 are independent and standard,
and e/64 bounds the whole block: a search for the best score opens the few blocks that can hold it.

The stream is the output's number among the n of its own prompt, so that a prompt in a list draws what it draws alone.

The counter is (number, position, stream, domain): the block's number for block draws, id // 4 for an id's own
draw, which is word id % 4. Everything is float64, so that devices whose logarithms differ in the last bit still pick
the same token.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from distserve.engine.philox import Words, exponential, key_words, philox4x32
from distserve.engine.sequence import Sequence

BLOCK = 64

_BLOCK_DOMAIN = 1
_ID_DOMAIN = 2


@dataclass(frozen=True, slots=True)
class Streams:
    """Where the noise of each row comes from: int64 [n, 4], columns seed low, seed high, position, stream."""

    columns: Tensor

    @classmethod
    def of(cls, sequences: Iterable[Sequence], device: torch.device) -> "Streams":
        """The streams of the token that each sequence draws next. `position` is that token's place in the sequence,
        which is the same on any worker, in any batch and after any preemption or resubmission."""
        rows = [[*key_words(s.sampling.seed), len(s.token_ids), s.sampling.stream] for s in sequences]
        return cls(torch.tensor(rows, dtype=torch.int64, device=device))

    def __getitem__(self, rows: Tensor | list[int]) -> "Streams":
        return Streams(self.columns[rows])

    def _words(self, numbers: Tensor, domain: int) -> Words:
        low, high, position, stream = self.columns.unsqueeze(1).unbind(-1)
        return philox4x32((numbers, position, stream, torch.full_like(position, domain)), (low, high))

    def block_draws(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """(smallest exponential, its slot 0..63) of blocks [n, k]: float64 and int64 [n, k]."""
        words = self._words(blocks, _BLOCK_DOMAIN)
        return exponential(words[0]).div_(BLOCK), words[1] % BLOCK

    def gumbel(self, ids: Tensor) -> Tensor:
        """Noise of vocabulary ids [n, k], float64 [n, k], each row from its own stream."""
        smallest, slot = self.block_draws(ids // BLOCK)
        words = torch.stack(self._words(ids // 4, _ID_DOMAIN), dim=-1)
        own = exponential(words.gather(-1, (ids % 4).unsqueeze(-1)).squeeze(-1))
        return smallest.add_(own.masked_fill_(ids % BLOCK == slot, 0.0)).log_().neg_()

    def block_gumbel(self, blocks: Tensor) -> Tensor:
        """Noise of every id of one block for each row: blocks int64 [n], float64 [n, 64]."""
        smallest, slot = self.block_draws(blocks.unsqueeze(1))
        quads = blocks.unsqueeze(1) * (BLOCK // 4) + torch.arange(BLOCK // 4, device=blocks.device)
        own = exponential(torch.stack(self._words(quads, _ID_DOMAIN), dim=-1)).flatten(1)
        own.scatter_(1, slot, 0.0)
        return own.add_(smallest).log_().neg_()
