"""A decoder of the usual kind (native/recognize.py) in nine kernels a layer, four of them matrix products.

    norm | queries, keys, values | norm by head, turn, store | attention | output | add, norm | gate, up | silu * | down

Products that read the same input are one product: their weights lie in one piece, of which the model's own layers hold
views from then on, so that nothing is there twice and the model's own code still runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.nn.functional import linear

from distserve.engine.attention.base import AttentionPlan
from distserve.engine.fused import kernels
from distserve.engine.loaded import LoadedModel
from distserve.engine.native.model import layer_window, rope_tables
from distserve.engine.native.recognize import require_known
from distserve.engine.paged_cache import PagedCache


class Pass(Protocol):
    """What of a batch is needed: int [T] each, and its attention."""

    @property
    def cache(self) -> PagedCache: ...

    @property
    def plan(self) -> AttentionPlan: ...

    @property
    def flat_ids(self) -> torch.Tensor: ...

    @property
    def flat_positions(self) -> torch.Tensor: ...

    @property
    def slots(self) -> torch.Tensor: ...

    def note_written(self, first: int, stop: int) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    norms: tuple[torch.Tensor, torch.Tensor] | None
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    window: int | None


class FusedModel:
    """Raises NativeUnavailable for a model that it doesn't compute."""

    def __init__(self, loaded: LoadedModel) -> None:
        require_known(loaded, "cuda")
        base, config = loaded.base, loaded.model.config
        self._num_heads = int(config.num_attention_heads)
        self._num_kv_heads, self._head_dim = loaded.layout.num_kv_heads, loaded.layout.head_dim
        self._eps = float(base.norm.variance_epsilon)
        self._scale = float(base.layers[0].self_attn.scaling)
        self._embedding = base.embed_tokens.weight
        self._norm = base.norm.weight
        self._rope = rope_tables(loaded)
        self._layers = [_fuse(config, layer) for layer in base.layers]

    def hidden(self, context: Pass) -> torch.Tensor:
        """Compute and write KV of all layers; hidden states after the final norm, [T, hidden_size]."""
        residual = self._embedding[context.flat_ids]
        num_tokens = len(residual)
        positions, slots = context.flat_positions, context.slots
        num_queries, num_keys = self._num_heads * self._head_dim, self._num_kv_heads * self._head_dim
        more: torch.Tensor | None = None
        for n, layer in enumerate(self._layers):
            normed = kernels.add_and_norm(residual, more, layer.input_norm, self._eps)
            qkv = linear(normed, layer.qkv, layer.qkv_bias)
            kernels.turn_and_store(
                qkv, self._rope, positions, slots, context.cache.layer(n), self._num_heads, layer.norms, self._eps
            )
            context.note_written(n, n + 1)
            q, k, v = (
                qkv[:, begin:end].view(num_tokens, -1, self._head_dim)
                for begin, end in pairwise((0, num_queries, num_queries + num_keys, num_queries + 2 * num_keys))
            )
            attended = context.plan.attend(n, q, k, v, scale=self._scale, window=layer.window, softcap=None)
            more = linear(attended.reshape(num_tokens, num_queries), layer.o)
            normed = kernels.add_and_norm(residual, more, layer.post_norm, self._eps)
            more = linear(kernels.silu_and_multiply(linear(normed, layer.gate_up)), layer.down)
        return kernels.add_and_norm(residual, more, self._norm, self._eps)


def _fuse(config: Any, layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_norms = hasattr(attention, "q_norm")
    biases = [p.bias for p in projections]
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=_in_one([p.weight for p in projections]),
        qkv_bias=None if biases[0] is None else _in_one(biases),
        norms=(attention.q_norm.weight, attention.k_norm.weight) if has_norms else None,
        o=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=_in_one([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
        window=layer_window(config, attention),
    )


def _in_one(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """One tensor of all their rows, of which they are views from now on."""
    whole = torch.cat([p.data for p in parameters])
    begin = 0
    for parameter in parameters:
        parameter.data = whole[begin : begin + len(parameter)]
        begin += len(parameter)
    return whole
