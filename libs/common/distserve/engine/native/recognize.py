"""Is a model of the kind that the compiled pass computes? Told from its modules, none of which may be unknown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from distserve.engine.loaded import LoadedModel
from distserve.engine.native.build import NativeUnavailable

# Decoder layers of: x += attention(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x))). Rotary embedding on whole
# heads, optional biases on queries, keys and values, optional norms of queries and keys by head.
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def require_known(loaded: LoadedModel, device: str = "cpu") -> None:
    """Raises NativeUnavailable with the first thing that passes compiled for the device don't compute."""
    config = loaded.model.config
    if config.model_type not in MODEL_TYPES:
        raise NativeUnavailable(f"model type {config.model_type}")
    if loaded.device.type != device:
        raise NativeUnavailable(f"device {loaded.device}")
    if config.hidden_act != "silu":
        raise NativeUnavailable(f"activation {config.hidden_act}")
    if loaded.layout.head_dim % 16:
        raise NativeUnavailable(f"heads of {loaded.layout.head_dim}, not a multiple of 16")
    base = loaded.base
    _require_children(base, BASE, "the model")
    for layer in base.layers:
        _require_children(layer, LAYER, "a layer")
        extra = HEAD_NORMS if hasattr(layer.self_attn, "q_norm") else set()
        _require_children(layer.self_attn, ATTENTION | extra, "attention")
        _require_children(layer.mlp, MLP, "an MLP")
        linears = [getattr(layer.self_attn, name) for name in sorted(ATTENTION)]
        linears += [getattr(layer.mlp, name) for name in sorted(MLP - {"act_fn"})]
        _require_plain(linears)
        _require_no_bias([layer.self_attn.o_proj, *(getattr(layer.mlp, name) for name in sorted(MLP - {"act_fn"}))])
    head = loaded.model.get_output_embeddings()
    _require_plain([head])
    _require_no_bias([head])
    dtype = base.embed_tokens.weight.dtype
    for name, weight in loaded.model.named_parameters():
        if weight.dtype != dtype or not weight.is_contiguous():
            raise NativeUnavailable(f"weight {name} is {weight.dtype} or not in one piece")


def _require_children(module: torch.nn.Module, wanted: set[str], what: str) -> None:
    found = {name for name, _ in module.named_children()}
    if found != wanted:
        raise NativeUnavailable(f"{what} is made of {', '.join(sorted(found ^ wanted))} too, or lacks it")


def _require_plain(linears: Iterable[Any]) -> None:
    for linear in linears:
        if type(linear) is not torch.nn.Linear:
            raise NativeUnavailable(f"a linear layer of type {type(linear).__name__}")


def _require_no_bias(linears: Iterable[Any]) -> None:
    if any(linear.bias is not None for linear in linears):
        raise NativeUnavailable("a bias on an output projection or in an MLP")
