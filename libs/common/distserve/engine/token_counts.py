"""How often each token has occurred in a sequence, kept up as it grows."""

import torch
from torch import Tensor


class TokenCounts:
    """Distinct ids and how often each has come, on the device where logits lie. `add` costs as much as what is new.

    Ids outside 0..vocab_size-1 have no logit and are left out.
    """

    __slots__ = ("_counts", "_ids", "_slots", "_vocab_size")

    def __init__(self, token_ids: list[int], vocab_size: int, device: torch.device) -> None:
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        ids, counts = tokens[(tokens >= 0) & (tokens < vocab_size)].unique(return_counts=True)  # type: ignore[no-untyped-call]
        self._slots = {token: slot for slot, token in enumerate(ids.tolist())}
        self._ids: Tensor = ids.to(device)
        self._counts: Tensor = counts.to(device)
        self._vocab_size = vocab_size

    def add(self, token_ids: list[int]) -> None:
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                continue
            slot = self._slots.setdefault(token, len(self._slots))
            if slot >= len(self._ids):
                room = torch.zeros(max(64, slot), dtype=torch.int64, device=self._ids.device)
                self._ids, self._counts = torch.cat((self._ids, room)), torch.cat((self._counts, room))
            self._ids[slot] = token
            self._counts[slot] += 1

    @property
    def ids(self) -> Tensor:
        """int64 [number of distinct ids], in no particular order."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Tensor:
        """int64, of each of `ids`."""
        return self._counts[: len(self._slots)]
