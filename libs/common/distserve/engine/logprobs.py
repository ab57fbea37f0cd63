"""Log-probabilities of tokens, with the likeliest alternatives."""

import torch
from torch import Tensor

from distserve.engine.filters import largest
from distserve.messages import TokenLogprob


def token_logprobs(logits: Tensor, token_ids: list[int], top_n: list[int]) -> list[TokenLogprob]:
    """Natural log-probability of token_ids[i] in row i of `logits` (float32 [n, vocab]), and of that row's top_n[i]
    likeliest tokens, of equal ones the lower ids first. Tokens of probability 0 are never among the likeliest."""
    if not token_ids:
        return []
    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    norm = logits.logsumexp(dim=1, keepdim=True)
    own = (logits.gather(1, chosen) - norm).squeeze(1).tolist()
    longest = min(max(top_n), logits.shape[1])
    if not longest:
        return [TokenLogprob(t, p) for t, p in zip(token_ids, own, strict=True)]
    values, ids = _top(logits, longest)
    tops = zip(ids.tolist(), (values - norm).tolist(), top_n, strict=True)
    likeliest = [
        tuple((i, p) for i, p in zip(row_ids[:n], row[:n], strict=True) if p > -torch.inf) for row_ids, row, n in tops
    ]
    return [TokenLogprob(*each) for each in zip(token_ids, own, likeliest, strict=True)]


def _top(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """`largest`, with ties at the end settled too: [rows, n] values and ids."""
    vocab = logits.shape[1]
    length = min(2 * n + 8, vocab)
    values, ids = largest(logits, length)
    tied = (values[:, n - 1] == values[:, -1]).nonzero().squeeze(1)
    values, ids = values[:, :n], ids[:, :n]
    if length < vocab and len(tied):
        values[tied], ids[tied] = (part[:, :n] for part in largest(logits[tied], vocab))
    return values, ids
