"""What a causal model does after its base model: the output layer and all that some put behind it.

Softcaps and logit scales live in the models' own forward functions. So the head is that function, run with the base
model's place taken by hidden states that are known already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distserve.engine.loaded import LoadedModel


class BaseOutput:
    """Stands for any base model's output: hidden states [1, n, hidden_size], by name or first, and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class Head:
    """hidden states [n, hidden_size] -> logits [n, vocab_size]. Not to be called from two threads at once."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._base = loaded.base

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        with self._instead_of_base(BaseOutput(hidden[None])):
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits[0]

    @contextmanager
    def _instead_of_base(self, output: BaseOutput) -> Iterator[None]:
        # An attribute of the instance hides the class's forward; deleting it brings that back.
        self._base.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del self._base.forward
