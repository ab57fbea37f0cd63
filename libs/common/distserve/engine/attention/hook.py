"""The attention function that models call, registered with transformers under one name.

Models hand their attention over through AttentionInterface and their masks through AttentionMaskInterface. Masks are
not built: the mask function only says what kind of mask the model wants (None: causal; WindowMask), and the attention
function reads it. Every argument a model passes is honoured or refused by name, never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from distserve.engine.context import BatchContext
from distserve.errors import ModelUnsupported

IMPLEMENTATION = "distserve_paged"

# What models pass along that says nothing about attention itself.
_HARMLESS = frozenset({"position_ids", "cache_position"})


@dataclass(frozen=True, slots=True)
class WindowMask:
    """A causal mask that leaves the last `size` tokens."""

    size: int


def register() -> None:
    """Make IMPLEMENTATION known to transformers. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_kind)


def mask_kind(*_: Any, **asked: Any) -> WindowMask | None:
    """In place of a mask: its kind. Refuses masks with an overlay (prefix-bidirectional, images and the like)."""
    config = asked.get("config")
    if asked.get("use_vmap"):
        raise _unsupported(config, "a mask other than causal or sliding window")
    size = asked.get("local_size")
    if size is None:
        return None
    if size != getattr(config, "sliding_window", None):
        raise _unsupported(config, "chunked attention")
    return WindowMask(int(size))


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: WindowMask | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    paged: BatchContext | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, num_heads, T, head_dim], key and value [1, num_kv_heads, T, head_dim] -> [1, T, num_heads, head_dim].

    `paged` is the batch, handed to the model's forward as a keyword. Raises ModelUnsupported (fields model, feature)
    for anything it can't honour.
    """
    config = getattr(module, "config", None)
    if paged is None:
        raise _unsupported(config, "forward keywords that do not reach attention")
    if dropout:
        raise _unsupported(config, f"attention dropout={dropout}")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise _unsupported(config, "bidirectional attention")
    for name, given in others.items():
        if given is not None and given is not False and name not in _HARMLESS:
            raise _unsupported(config, f"attention argument {name}")
    window = _window(config, attention_mask, sliding_window)
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    _check_shape(config, layer, k, v, paged)
    paged.write(layer, k, v)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return paged.plan.attend(layer, q, k, v, scale=scale, window=window, softcap=softcap)[None], None


def _window(config: Any, mask: WindowMask | None, sliding_window: int | None) -> int | None:
    """The window of this layer. The mask is what counts (eager and sdpa look at nothing else); an argument that says
    otherwise is refused."""
    if mask is not None and not isinstance(mask, WindowMask):
        raise _unsupported(config, f"an attention mask of its own ({type(mask).__name__})")
    window = None if mask is None else mask.size
    if sliding_window is not None and sliding_window != window:
        raise _unsupported(config, f"attention argument sliding_window={sliding_window} under a mask of {window}")
    return window


def _check_shape(config: Any, layer: int, key: torch.Tensor, value: torch.Tensor, paged: BatchContext) -> None:
    layout = paged.cache.layout
    wanted = (layout.num_kv_heads, layout.head_dim)
    if layer != paged.layers_written or layer >= layout.num_layers:
        raise _unsupported(config, f"layers that attend out of order or twice (layer {layer})")
    if tuple(key.shape[1:]) != wanted or tuple(value.shape[1:]) != wanted:
        raise _unsupported(config, f"per-layer KV shapes (layer {layer}: {list(key.shape[1:])}, cache: {list(wanted)})")


def _unsupported(config: Any, feature: str) -> ModelUnsupported:
    model = str(getattr(config, "model_type", "unknown"))
    return ModelUnsupported(f"model type {model} uses {feature}, which is not served", model=model, feature=feature)
