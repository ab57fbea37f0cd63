"""What one forward pass is asked to do, and what it gives back. Plain data: no torch here."""

from dataclasses import dataclass, field

from distserve.engine.sequence import Sequence
from distserve.messages import TokenLogprob


@dataclass(slots=True)
class Work:
    """`num_tokens` tokens of `sequence`, starting at its num_computed_tokens (`start`, frozen here).

    `samples`: this is the last uncomputed part, so the pass ends in a next token. A sequence's block table must
    already cover start + num_tokens.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class Batch:
    """One forward pass: decode steps (num_tokens == 1) and prefill chunks may be mixed."""

    work: list[Work] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(w.num_tokens for w in self.work)


@dataclass(slots=True)
class Sampled:
    """The outcome of one Work with samples=True (in the batch's order); the runner changes no sequence."""

    sequence: Sequence
    token_id: int
    logprob: TokenLogprob | None = None
    last_hidden: bytes = b""  # if the runner was asked to keep it
    prompt_logprobs: list[TokenLogprob] | None = None  # complete, on the pass that ends the prompt, if asked for


def chunk_tokens(sequence: Sequence, budget: int, block_size: int) -> int:
    """How many of the sequence's uncomputed tokens the next pass takes within `budget` tokens.

    A chunk that is not the sequence's last ends on a block boundary, so that each block is complete, and shipped,
    in exactly one pass. 0 if not even that fits.
    """
    left = sequence.num_uncomputed_tokens
    if left <= budget:
        return left
    start = sequence.num_computed_tokens
    return max(0, (start + budget) // block_size * block_size - start)
