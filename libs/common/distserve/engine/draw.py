"""One token for each row of logits: the largest, or a draw from the distribution by Gumbel-max (noise.py).

Both ways of drawing give each token the same score, (logit - largest) / temperature + noise(id) in float64, so they
differ in cost only. Logits are float32 [n, vocab] with at least one finite value a row and no NaN or +inf.
"""

import torch
from torch import Tensor

from distserve.engine.filters import is_filtered, shortlists
from distserve.engine.noise import BLOCK, Streams
from distserve.engine.sequence import Sequence

# Above this many survivors a search by blocks is cheaper than the noise of each.
_LONG = 2048

# More than float64's rounding of a score, so that rounding never closes a block that holds the best.
_SLACK = 1e-9


def greedy(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """The id of each row's largest logit, of equal ones the lowest: int64 [n]."""
    return logits.argmax(dim=1)


def draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """An id for each row, drawn at the sequence's temperature from what its filters leave: int64 [n]."""
    streams = Streams.of(sequences, logits.device)
    temperature = torch.tensor([[s.sampling.temperature] for s in sequences], dtype=torch.float64, device=logits.device)
    filtered = [i for i, s in enumerate(sequences) if is_filtered(s.sampling)]
    if not filtered:
        return _search(logits, temperature, streams)

    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    whole = [i for i, s in enumerate(sequences) if not is_filtered(s.sampling)]
    if whole:
        tokens[whole] = _search(logits[whole], temperature[whole], streams[whole])
    x = logits[filtered] if whole else logits
    rows = torch.tensor(filtered, device=logits.device)
    for short in shortlists(x, temperature[rows], [sequences[i].sampling for i in filtered]):
        own = rows[short.rows]
        if short.ids.shape[1] > _LONG:
            survivors = torch.full((len(own), x.shape[1]), -torch.inf, dtype=torch.float64, device=x.device)
            survivors.scatter_(1, short.ids, short.scaled)
            tokens[own] = _search(survivors, torch.ones_like(temperature[own]), streams[own])
        else:
            best = (short.scaled + streams[own].gumbel(short.ids)).argmax(dim=1, keepdim=True)
            tokens[own] = short.ids.gather(1, best).squeeze(1)
    return tokens


def _search(logits: Tensor, temperature: Tensor, streams: Streams) -> Tensor:
    """The best of every id, opening only the blocks of ids whose bound reaches the best score known."""
    n, vocab = logits.shape
    num_blocks = -(-vocab // BLOCK)
    if vocab % BLOCK:
        logits = torch.nn.functional.pad(logits, (0, num_blocks * BLOCK - vocab), value=-torch.inf)
    blocked = logits.reshape(n, num_blocks, BLOCK)

    smallest, slot = streams.block_draws(torch.arange(num_blocks, device=logits.device).expand(n, -1))
    noise = smallest.log_().neg_()
    peaks = blocked.amax(dim=2)
    peak = peaks.amax(dim=1, keepdim=True).double()
    bound = (peaks.double() - peak) / temperature + noise
    known = (blocked.gather(2, slot.unsqueeze(2)).squeeze(2).double() - peak) / temperature + noise
    rows, blocks = (bound >= known.amax(dim=1, keepdim=True) - _SLACK).nonzero(as_tuple=True)

    scores = (blocked[rows, blocks].double() - peak[rows]) / temperature[rows] + streams[rows].block_gumbel(blocks)
    best, slots = scores.max(dim=1)
    row_best = torch.full((n,), -torch.inf, dtype=torch.float64, device=logits.device)
    row_best.scatter_reduce_(0, rows, best, "amax")
    ids = torch.where(best == row_best[rows], blocks * BLOCK + slots, vocab)
    tokens = torch.full((n,), vocab, dtype=torch.int64, device=logits.device)
    return tokens.scatter_reduce_(0, rows, ids, "amin")
