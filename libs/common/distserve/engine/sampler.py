"""From logits to tokens.

    logits -> penalties, bias, min_tokens -> logprobs are taken here
           -> temperature -> top_k -> top_p -> min_p -> + noise -> the largest is the token

The noise (noise.py) depends on seed, position, stream and vocabulary id only. So equal logits give equal
tokens in any batch, in any order, on any worker, after preemption and after resubmission.
"""

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from distserve.engine.draw import draw, greedy
from distserve.engine.logprobs import token_logprobs
from distserve.engine.penalties import Penalties, needs_adjusting, validate
from distserve.engine.sequence import Sequence
from distserve.errors import DistServeError
from distserve.messages import SamplingParams, TokenLogprob

NO_TOKEN = -1


class Sampler:
    """All that decides is in the sequences; what it keeps of them (Penalties) is derived and saves time only.

    `vocab_size`: ids at and above it are never drawn, though models may have padded logits for them. `device`: where
    logits will come; the work is done where they lie.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Seq[int], device: str = "cpu") -> None:
        self.vocab_size = vocab_size
        self._penalties = Penalties(eos_token_ids)
        self.device = torch.device(device)

    def validate(self, sampling: SamplingParams) -> None:
        """Raises InvalidRequest for a logit_bias id or a seed out of range. Call it before a sequence is admitted."""
        validate(sampling, self.vocab_size)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, sequences: list[Sequence], best: Tensor | None = None
    ) -> list[tuple[int, TokenLogprob | None]]:
        """The next token of each sequence from its row of `logits` ([n, vocab], any float dtype and device), with
        its logprob if asked for. Changes neither.

        Temperature 0 takes the largest logit, of equal ones the lowest id. A row with a NaN, a +inf or no finite
        logit gives (NO_TOKEN, None): that sequence has to end with "error", the others go on. Ids that `validate` would
        have refused change nothing. best: float64 [2, n], each row's largest logit among the ids below vocab_size, and
        its id, if that is known.
        """
        if not sequences:
            return []
        logits = self._checked(logits, len(sequences))
        if all(_is_plain(s) for s in sequences):
            return [(token, None) for token in _tokens(_best(logits) if best is None else best)]
        logits = self._adjusted(logits.float(), sequences)
        good = logits.amax(dim=1).isfinite().tolist()
        tokens = [NO_TOKEN] * len(sequences)

        for method in (greedy, draw):
            rows = [
                i for i, s in enumerate(sequences) if good[i] and (s.sampling.temperature == 0.0) == (method is greedy)
            ]
            if rows:
                picked = method(logits if len(rows) == len(sequences) else logits[rows], [sequences[i] for i in rows])
                for i, token in zip(rows, picked.tolist(), strict=True):
                    tokens[i] = token

        asked = {i: n for i, s in enumerate(sequences) if good[i] and (n := s.sampling.logprobs) is not None}
        found = token_logprobs(logits[list(asked)], [tokens[i] for i in asked], list(asked.values())) if asked else []
        logprobs = dict(zip(asked, found, strict=True))
        return [(token, logprobs.get(i)) for i, token in enumerate(tokens)]

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, next_ids: list[int], top_n: int) -> list[TokenLogprob]:
        """Row i of `logits` ([n, vocab]) predicts next_ids[i], a token of the prompt: its logprob under the model's
        own distribution, and the top_n likeliest. A row that is not finite gives NaN."""
        return token_logprobs(self._checked(logits, len(next_ids)).float(), next_ids, [top_n] * len(next_ids))

    def _checked(self, logits: Tensor, num_rows: int) -> Tensor:
        if logits.dim() != 2 or logits.shape[0] != num_rows or logits.shape[1] < self.vocab_size:
            raise DistServeError(
                f"logits have the shape {list(logits.shape)}, expected [{num_rows}, {self.vocab_size} or more]"
            )
        return logits[:, : self.vocab_size]

    def _adjusted(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        rows = [i for i, s in enumerate(sequences) if needs_adjusting(s)]
        if rows:
            logits = logits.clone()
        for i in rows:
            self._penalties.adjust(logits[i], sequences[i])
        return logits


def _is_plain(sequence: Sequence) -> bool:
    """Its token is that of the largest logit, as the model gave it, and nothing else is asked."""
    p = sequence.sampling
    return p.temperature == 0.0 and p.logprobs is None and not needs_adjusting(sequence)


def _best(logits: Tensor) -> Tensor:
    """Float64, in which ids are exact: one copy from the device brings both."""
    values, ids = logits.max(dim=1)
    return torch.stack((values.double(), ids.double()))


def _tokens(best: Tensor) -> list[int]:
    """At temperature 0: most steps of most servers need no more. `max` takes the lowest of equal ones, and the first
    NaN for the largest."""
    return [int(i) if math.isfinite(value) else NO_TOKEN for value, i in zip(*best.tolist(), strict=True)]
