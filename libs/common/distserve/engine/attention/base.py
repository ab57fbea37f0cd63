"""The contract of an attention backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from distserve.engine.context import BatchContext


class AttentionPlan(Protocol):
    """What a backend works out once for a batch and uses in every layer."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        skip_decode: bool = False,
    ) -> torch.Tensor:
        """Causal attention of each row's token over its sequence's tokens so far, itself included.

        query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim], in the context's row order; the
        batch's own keys and values are in the cache already. Scores are multiplied by `scale`, then squashed to
        softcap * tanh(score / softcap); a `window` leaves the last that many tokens. Returns [T, num_heads,
        head_dim]; with skip_decode, only the rows behind the context's first `num_decode`.
        """
        ...


class AttentionBackend(Protocol):
    name: str
    reads_whole_blocks: bool  # also behind a sequence's last token, masked: a NaN there would come through

    def plan(self, context: BatchContext) -> AttentionPlan: ...
