"""A model in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distserve.messages import KVLayout


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model ready to run, and what the rest of the system must know of it.

    model: the whole causal model; base: the part of it that ends in the final norm's hidden states.
    vocab_size: the logits' width (a tokenizer may know fewer). max_model_len: tokens, prompt and output together.
    dtype: of the weights, the KV and the hidden states, as in KVLayout.
    """

    model: Any
    base: Any
    layout: KVLayout
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    hidden_size: int
    name: str
    dtype: str
    device: torch.device
