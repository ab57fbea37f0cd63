"""Changes to a row of logits that a request asks for, before its probabilities are taken."""

import torch
from torch import Tensor

from distserve.engine.sequence import Sequence
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


def adjust(row: Tensor, sequence: Sequence, eos_token_ids: tuple[int, ...]) -> None:
    """Apply to `row` (float32 [vocab], changed in place), in this order:

    repetition penalty: logits of tokens seen in prompt or output are divided by it where positive and multiplied
        where negative (Keskar et al., "CTRL", 2019, section 4.1);
    presence and frequency penalties: logit -= presence + frequency * count for tokens of the output (OpenAI's
        definition);
    logit bias: logit += bias;
    min_tokens: eos and stop token ids are impossible until the output has that many, with ignore_eos too.
    """
    p = sequence.sampling
    if p.repetition_penalty != 1.0:
        seen = _counts(sequence.token_ids, row)[0]
        logits = row[seen]
        row[seen] = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and sequence.num_output_tokens:
        seen, counts = _counts(sequence.token_ids[sequence.num_prompt_tokens :], row)
        row[seen] -= p.presence_penalty + p.frequency_penalty * counts
    if p.logit_bias:
        row[list(p.logit_bias)] += torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=row.device)
    if sequence.num_output_tokens < p.min_tokens:
        row[[i for i in {*eos_token_ids, *p.stop_token_ids} if 0 <= i < len(row)]] = -torch.inf


def _counts(token_ids: list[int], row: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids and how often each occurs. Ids that have no logit (rows cut to a tokenizer's size) are left out."""
    ids, counts = torch.tensor(token_ids, dtype=torch.int64).unique(return_counts=True)  # type: ignore[no-untyped-call]
    known = ids < len(row)
    return ids[known].to(row.device), counts[known].to(row.device)


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
