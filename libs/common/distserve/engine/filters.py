"""top_k, top_p and min_p: which tokens of a distribution may be drawn.

In the order (logit falling, id rising) each of the three keeps a prefix, so all together keep the shortest of them.
Rows are not sorted whole: a short list of the largest logits is, and a longer one only where the cut lies beyond it
or ties with its end.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from distserve.messages import SamplingParams

_LIST_LENGTHS = (256, 4096)


def is_filtered(sampling: SamplingParams) -> bool:
    return bool(sampling.top_k or sampling.top_p < 1.0 or sampling.min_p)


@dataclass(frozen=True, slots=True)
class Shortlist:
    """What may be drawn in some rows. `scaled` is (logit - largest) / temperature, -inf beyond what is kept."""

    rows: Tensor  # int64 [m], indices into the rows that were asked about
    ids: Tensor  # int64 [m, k], logits falling, then ids rising
    scaled: Tensor  # float64 [m, k]


def shortlists(logits: Tensor, temperature: Tensor, sampling: list[SamplingParams]) -> Iterator[Shortlist]:
    """The survivors of every row of `logits` (float32 [n, vocab], at least one finite and none NaN or +inf);
    temperature is float64 [n, 1]. Each row comes in exactly one list.

    top_k keeps k tokens, of equal logits at the edge the lower ids. top_p keeps the fewest tokens whose mass within
    what top_k left is at least top_p. min_p keeps tokens at least min_p times as likely as the likeliest. One token
    always stays.
    """
    cuts = _Cuts.of(logits, temperature, sampling)
    rows = torch.arange(len(sampling), device=logits.device)
    for length in (*_LIST_LENGTHS, logits.shape[1]):
        if length > logits.shape[1]:
            continue
        values, ids = largest(logits[rows], length)
        scaled = (values.double() - values[:, :1]) / temperature[rows]
        num_kept = cuts[rows].num_kept(scaled)
        if length < logits.shape[1]:
            # The cut is sure if it lies before the list's last run of equal logits.
            edge = values.gather(1, num_kept.unsqueeze(1) - 1).squeeze(1)
            sure = (values[:, -1] < edge) & (cuts.top_k[rows, 0] < length)
        else:
            sure = torch.ones_like(rows, dtype=torch.bool)
        picked = sure.nonzero().squeeze(1)
        if len(picked):
            kept = num_kept[picked]
            width = int(kept.max())
            scaled = scaled[picked, :width]
            beyond = torch.arange(width, device=rows.device) >= kept.unsqueeze(1)
            yield Shortlist(rows[picked], ids[picked, :width], scaled.masked_fill_(beyond, -torch.inf))
        rows = rows[~sure]
        if not len(rows):
            return


def largest(logits: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The `length` largest values of each row and their ids, values falling, then ids rising. (Which of several
    equal values at the end of the list are in it is up to the device.)"""
    if length < logits.shape[1]:
        ids = logits.topk(length, sorted=False).indices.sort().values
        values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
        return values, ids.gather(1, order)
    values, ids = logits.sort(dim=1, descending=True, stable=True)
    return values, ids


@dataclass(frozen=True, slots=True)
class _Cuts:
    top_k: Tensor  # int64 [n, 1], 0: off
    top_p: Tensor  # float64 [n, 1]
    min_p: Tensor  # float64 [n, 1]
    mass: Tensor  # float64 [n, 1]: sum of exp(scaled) over the vocabulary, where top_p needs it

    @classmethod
    def of(cls, logits: Tensor, temperature: Tensor, sampling: list[SamplingParams]) -> "_Cuts":
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device).unsqueeze(1)

        mass = torch.ones(len(sampling), 1, dtype=torch.float64, device=logits.device)
        rows = [i for i, p in enumerate(sampling) if p.top_p < 1.0 and not p.top_k]
        if rows:
            x = logits if len(rows) == len(sampling) else logits[rows]
            # Single precision is enough for the terms; a sum in double does not depend on how it is split.
            scaled = (x - x.amax(dim=1, keepdim=True)).div_(temperature[rows].float().clamp_(min=1e-37))
            mass[rows] = scaled.exp_().sum(dim=1, keepdim=True, dtype=torch.float64)
        return cls(
            column([p.top_k for p in sampling], torch.int64),
            column([p.top_p for p in sampling], torch.float64),
            column([p.min_p for p in sampling], torch.float64),
            mass,
        )

    def __getitem__(self, rows: Tensor) -> "_Cuts":
        return _Cuts(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.mass[rows])

    def num_kept(self, scaled: Tensor) -> Tensor:
        """How long a prefix stays, int64 [m], of float64 [m, k] sorted falling. Too short if the list is."""
        in_top_k = (torch.arange(scaled.shape[1], device=scaled.device) < self.top_k) | (self.top_k == 0)
        weights = scaled.exp().mul_(in_top_k)
        up_to = weights.cumsum(dim=1)
        mass = torch.where(self.top_k > 0, up_to[:, -1:], self.mass)
        before = torch.cat((torch.zeros_like(mass), up_to[:, :-1]), dim=1)
        in_top_p = (before < self.top_p * mass) | (self.top_p >= 1.0)
        in_min_p = scaled >= self.min_p.log()
        kept = in_top_k & in_top_p & in_min_p & (scaled > -torch.inf)
        return kept.sum(dim=1).clamp_(min=1)
