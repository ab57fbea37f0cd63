"""Changes to a row of logits that a request asks for, before its probabilities are taken."""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from distserve.engine.sequence import Sequence
from distserve.engine.token_counts import TokenCounts
from distserve.errors import InvalidRequest
from distserve.messages import SamplingParams


def needs_adjusting(sequence: Sequence) -> bool:
    p = sequence.sampling
    return bool(
        p.repetition_penalty != 1.0
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or sequence.num_output_tokens < p.min_tokens
    )


class Penalties:
    """What each sequence's tokens and parameters come to is kept as long as the sequence lives, and brought up to date
    from its new tokens alone: a step costs the same at any length."""

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._kept: WeakKeyDictionary[Sequence, _Kept] = WeakKeyDictionary()

    def adjust(self, row: Tensor, sequence: Sequence) -> None:
        """Apply to `row` (float32 [vocab], changed in place), in this order:

        repetition penalty: logits of tokens seen in prompt or output are divided by it where positive and multiplied
            where negative (Keskar et al., "CTRL", 2019, section 4.1);
        presence and frequency penalties: logit -= presence + frequency * count for tokens of the output (OpenAI's
            definition);
        logit bias: logit += bias;
        min_tokens: eos and stop token ids are impossible until the output has that many, with ignore_eos too.

        Ids that have no logit (rows cut to a tokenizer's size) are left out everywhere.
        """
        p = sequence.sampling
        kept = self._kept.get(sequence)
        if kept is None or not kept.catch_up(row, sequence):
            kept = self._kept[sequence] = _Kept(row, sequence, self._eos_token_ids)
        if kept.seen is not None:
            logits = row[kept.seen.ids]
            penalty = p.repetition_penalty
            row[kept.seen.ids] = torch.where(logits > 0, logits / penalty, logits * penalty)
        if kept.output is not None:
            row[kept.output.ids] -= p.presence_penalty + p.frequency_penalty * kept.output.counts
        if p.logit_bias:
            row[kept.bias_ids] += kept.bias
        if sequence.num_output_tokens < p.min_tokens:
            row[kept.end_ids] = -torch.inf


class _Kept:
    """One sequence's. Counts are None where its parameters do not ask for them."""

    __slots__ = (
        "_last",
        "_num_counted",
        "_num_prompt_tokens",
        "_sampling",
        "_shape",
        "bias",
        "bias_ids",
        "end_ids",
        "output",
        "seen",
    )

    def __init__(self, row: Tensor, sequence: Sequence, eos_token_ids: tuple[int, ...]) -> None:
        p, tokens, vocab_size, device = sequence.sampling, sequence.token_ids, len(row), row.device
        self._sampling, self._num_prompt_tokens, self._shape = p, sequence.num_prompt_tokens, (vocab_size, device)
        self.seen = TokenCounts(tokens, vocab_size, device) if p.repetition_penalty != 1.0 else None
        self.output: TokenCounts | None = None
        if p.presence_penalty or p.frequency_penalty:
            self.output = TokenCounts(tokens[sequence.num_prompt_tokens :], vocab_size, device)
        known = {i: bias for i, bias in p.logit_bias.items() if 0 <= i < vocab_size}
        self.bias_ids = torch.tensor(list(known), dtype=torch.int64, device=device)
        self.bias = torch.tensor(list(known.values()), dtype=row.dtype, device=device)
        ends = [i for i in {*eos_token_ids, *p.stop_token_ids} if 0 <= i < vocab_size] if p.min_tokens else []
        self.end_ids = torch.tensor(ends, dtype=torch.int64, device=device)
        self._note(tokens)

    def _note(self, tokens: list[int]) -> None:
        self._num_counted = len(tokens)
        self._last = tokens[-1] if tokens else None

    def catch_up(self, row: Tensor, sequence: Sequence) -> bool:
        """Count what is new. False if the sequence has changed in another way than by growing: count afresh then."""
        tokens, n = sequence.token_ids, self._num_counted
        grown = len(tokens) >= n and (not n or tokens[n - 1] == self._last)
        same = sequence.num_prompt_tokens == self._num_prompt_tokens and sequence.sampling is self._sampling
        if not (grown and same and self._shape == (len(row), row.device)):
            return False
        new = tokens[n:]
        for counts in (self.seen, self.output):
            if counts is not None:
                counts.add(new)
        self._note(tokens)
        return True


def validate(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest for what only a side that knows the vocabulary can check."""
    for token_id in sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"logit_bias has the token id {token_id}, ids of this model are 0 to {vocab_size - 1}",
                param="logit_bias",
                value=token_id,
                expected=f"0..{vocab_size - 1}",
            )
    if not 0 <= sampling.seed < 2**64:
        raise InvalidRequest(
            f"seed is {sampling.seed}, must be between 0 and 2^64 - 1",
            param="seed",
            value=str(sampling.seed),
            expected="0..18446744073709551615",
        )
