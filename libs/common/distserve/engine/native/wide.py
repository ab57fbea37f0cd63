"""The linear layers of a model as plain matrix products into memory that is there already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distserve.engine.loaded import LoadedModel


class Product:
    """out = x W^T + bias, of one torch.nn.Linear."""

    def __init__(self, linear: Any) -> None:
        self._transposed: torch.Tensor = linear.weight.t()
        self._bias: torch.Tensor | None = linear.bias

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._bias is None:
            torch.mm(x, self._transposed, out=out)
        else:
            torch.addmm(self._bias, x, self._transposed, out=out)


@dataclass(frozen=True, slots=True)
class WideLayer:
    q: Product
    k: Product
    v: Product
    o: Product
    gate: Product
    up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class Widths:
    """Outputs of a layer's projections."""

    q: int
    kv: int
    inner: int


class WideLayers:
    def __init__(self, loaded: LoadedModel) -> None:
        self.layers = [_layer(layer) for layer in loaded.base.layers]
        first = loaded.base.layers[0]
        self.widths = Widths(
            first.self_attn.q_proj.out_features, first.self_attn.k_proj.out_features, first.mlp.gate_proj.out_features
        )


def _layer(layer: Any) -> WideLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return WideLayer(
        q=Product(attention.q_proj),
        k=Product(attention.k_proj),
        v=Product(attention.v_proj),
        o=Product(attention.o_proj),
        gate=Product(mlp.gate_proj),
        up=Product(mlp.up_proj),
        down=Product(mlp.down_proj),
    )
