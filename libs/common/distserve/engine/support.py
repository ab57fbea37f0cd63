"""Which models can't be served right, told from their configuration before any weight is read.

The engine serves causal models whose cache is keys and values of one shape in every layer, and whose every token's
keys and values depend only on the tokens before it and its position. What a configuration doesn't tell is caught by
the attention function (attention/hook.py) and by the check against the model's own attention (probe.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distserve.errors import ModelUnsupported

LATENT_ATTENTION = {
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "minicpm3",
    "longcat_flash",
    "kimi_k25",
}
STATE_SPACE = {
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
    "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
}  # fmt: skip
ATTENTION_SINKS = {"gpt_oss", "flint", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash", "inkling2"}
PER_LAYER_KV = {"gemma4", "gemma4_text", "openelm", "decilm", "nemotron-nas"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
SERVED_LAYERS = {"full_attention", "sliding_attention"}


def require_supported(config: Any, model: str) -> None:
    """Raises ModelUnsupported (fields model, feature) for the first thing in `config` that can't be served."""
    for feature in unsupported_features(config):
        raise ModelUnsupported(f"{model} uses {feature}, which is not served", model=model, feature=feature)


def unsupported_features(config: Any) -> Iterator[str]:
    """What of a transformers configuration the engine can't honour, by name."""
    text = config.get_text_config(decoder=True)
    kind = str(text.model_type)

    def has(name: str) -> Any:
        return getattr(text, name, None)

    if getattr(config, "is_encoder_decoder", False):
        yield f"an encoder and a decoder (model type {config.model_type})"
    if has("kv_lora_rank") or kind in LATENT_ATTENTION:
        yield f"multi-head latent attention (model type {kind})"
    if kind in STATE_SPACE or has("mamba_d_state") or has("ssm_cfg") or has("linear_key_head_dim"):
        yield f"state-space or linear-attention layers (model type {kind})"
    if kind in ATTENTION_SINKS:
        yield f"attention sinks (model type {kind})"
    if has("num_kv_shared_layers"):
        yield f"KV shared between layers (num_kv_shared_layers={text.num_kv_shared_layers})"
    if kind in PER_LAYER_KV:
        yield f"per-layer KV shapes (model type {kind})"
    for name in ("head_dim", "num_key_value_heads", "num_attention_heads"):
        if isinstance(has(name), list | tuple):
            yield f"per-layer KV shapes ({name}={list(has(name))})"
    if has("use_bidirectional_attention") or has("is_causal") is False:
        yield "bidirectional attention"
    if has("attention_chunk_size"):
        yield f"chunked attention (attention_chunk_size={text.attention_chunk_size})"
    if has("attn_temperature_tuning"):
        yield "attention temperature tuning"
    if has("alibi"):
        yield "ALiBi position bias"
    for layer_type in sorted(set(has("layer_types") or ()) - SERVED_LAYERS):
        yield f"layers of type {layer_type}"
    for rope_type in rope_types(text):
        if rope_type in LENGTH_DEPENDENT_ROPE:
            yield f"length-switching RoPE (rope_type={rope_type})"


def rope_types(text: Any) -> list[str]:
    """The rope_type of every set of rotary parameters in a text configuration: one, or one a layer type."""
    found: list[str] = []
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(text, name, None)
        if not isinstance(settings, dict):
            continue
        for part in (settings, *settings.values()):
            if isinstance(part, dict):
                rope_type = part.get("rope_type") or part.get("type")
                if rope_type is not None and rope_type not in found:
                    found.append(str(rope_type))
    return found
