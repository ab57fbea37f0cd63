"""What makes two loads of a model the same model: its weights and what its configuration says of them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

# Numbers read of each tensor. A fine-tune changes nearly all of a tensor, so this many at even distances tell it.
SAMPLES = 1024

# Settings that say where a model came from or how it is run, not what it computes.
_INCIDENTAL = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "name_or_path",
    "chunk_size_feed_forward",
    "output_attentions", "output_hidden_states", "return_dict", "bos_token_id", "eos_token_id", "pad_token_id",
    "id2label", "label2id", "problem_type", "quantization_config",
}  # fmt: skip


def weights_identity(model: torch.nn.Module, config: Any) -> str:
    """sha256, in hex, over the configuration and each parameter's name, shape and SAMPLES of its values.

    The same on every machine for the same files loaded in the same dtype by the same release of transformers.
    """
    digest = hashlib.sha256(_canonical(_essential(config.to_dict())).encode())
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"\n{name} {list(weight.shape)}\n".encode())
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def rope_identity(text: Any) -> str:
    """Canonical JSON of every rotary setting of a text configuration."""
    # rope_scaling is another name of rope_parameters.
    names = ("rope_parameters", "rope_theta", "partial_rotary_factor", "rope_local_base_freq")
    found = {name: getattr(text, name, None) for name in names}
    return _canonical({name: value for name, value in found.items() if value is not None})


def _essential(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(k): _essential(v) for k, v in value.items() if str(k) not in _INCIDENTAL and not str(k).startswith("_")
        }
    return [_essential(v) for v in value] if isinstance(value, list | tuple) else value


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
