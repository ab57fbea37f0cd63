"""Loading a model: transformers' own code and weights, with attention over the paged cache."""

from __future__ import annotations

import inspect
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from distserve.engine.attention.hook import IMPLEMENTATION, register
from distserve.engine.identity import rope_identity, weights_identity
from distserve.engine.loaded import LoadedModel
from distserve.engine.paged_cache import DTYPES
from distserve.engine.probe import require_agreement
from distserve.engine.support import require_supported
from distserve.errors import ConfigError, ModelUnsupported
from distserve.messages import KVLayout


def load_model(
    path: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    block_size: int = 16,
    max_model_len: int = 0,
    probe: bool = True,
) -> LoadedModel:
    """Load a folder in Hugging Face format, a .gguf file or a hub id (which needs the network).

    dtype: "auto" (what the weights are in), "bfloat16", "float16" or "float32". max_model_len 0: the model's own.
    Raises ConfigError for a value that can't be, ModelUnsupported (fields model, feature) for a model that can't be
    served; where the configuration tells, before weights are read. `probe` lets the loaded model answer two short
    texts with its own attention and with ours, and refuses it when they disagree (a few forward passes).
    """
    register()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    _require(block_size >= 1, "block_size", block_size, ">= 1")
    _require(dtype == "auto" or dtype in DTYPES, "dtype", dtype, f"auto, {', '.join(DTYPES)}")
    source, options, name = _source(path)
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError) as e:
        raise _unreadable(path, e) from e
    require_supported(config, name)
    text = config.get_text_config(decoder=True)
    limit = _max_model_len(text, max_model_len)
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            source,
            **options,
            dtype=dtype if dtype == "auto" else DTYPES[dtype],
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
            **({} if torch.device(device).type == "cpu" else {"device_map": {"": device}}),
        )
    except OSError as e:
        raise _unreadable(path, e) from e
    except KeyError as e:  # what a model raises whose attention classes are a table of its own
        feature = "attention that can't be replaced"
        raise ModelUnsupported(f"{name} has {feature}: no entry {e}", model=name, feature=feature) from e
    except (ValueError, TypeError) as e:
        raise ModelUnsupported(
            f"transformers can't load {name} with attention of ours: {e}", model=name, feature=_first_line(e)
        ) from e
    if missing := sorted([*loading["missing_keys"], *(str(key) for key in loading["mismatched_keys"])]):
        # transformers would go on with random numbers in their place.
        raise _unreadable(path, ValueError(f"{len(missing)} weights are missing or misshapen, {missing[0]} first"))
    model.eval()
    found = str(model.dtype).removeprefix("torch.")
    if found not in DTYPES:
        raise ModelUnsupported(f"{name} has weights of {found}, not served", model=name, feature=f"dtype {found}")
    loaded = LoadedModel(
        model=model,
        base=_base(model, name),
        layout=KVLayout(
            weights=weights_identity(model, config),
            dtype=found,
            num_layers=int(text.num_hidden_layers),
            num_kv_heads=int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads),
            block_size=block_size,
            rope=rope_identity(text),
        ),
        max_model_len=limit,
        eos_token_ids=_eos_token_ids(model, config, text),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        hidden_size=int(text.hidden_size),
        name=name,
        dtype=found,
        device=torch.device(device),
    )
    if probe:
        require_agreement(loaded)
    return loaded


def likely_dtype(path: str | Path, dtype: str) -> str:
    """What load_model will most likely answer as the dtype, without loading anything. Never raises."""
    if dtype != "auto":
        return dtype
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((Path(path) / "config.json").read_text())
        found = str(config.get("dtype") or config.get("torch_dtype"))
        if found in DTYPES:
            return found
    return "bfloat16"


def _source(path: str | Path) -> tuple[str, dict[str, Any], str]:
    """What from_pretrained takes for `path`, and the model's name."""
    place = Path(path)
    if place.suffix == ".gguf":
        _require(place.is_file(), "model", str(path), "a .gguf file that exists")
        return str(place.parent), {"gguf_file": place.name}, place.stem
    if place.is_dir():
        _require((place / "config.json").is_file(), "model", str(path), "a folder with a config.json")
        return str(place), {"local_files_only": True}, place.resolve().name
    looks_like_id = not str(path).startswith((".", "/", "~")) and len(place.parts) <= 2
    _require(looks_like_id, "model", str(path), "a folder, a .gguf file or a hub id (owner/name)")
    return str(path), {}, str(path).split("/")[-1]


def _base(model: Any, name: str) -> Any:
    base = model.base_model
    if base is model or model.get_output_embeddings() is None:
        feature = "no base model with an output layer on top"
        raise ModelUnsupported(f"{name} has {feature}, which is not served", model=name, feature=feature)
    if "position_ids" not in inspect.signature(base.forward).parameters:
        feature = "positions that are not given by position_ids"
        raise ModelUnsupported(f"{name} has {feature}, which is not served", model=name, feature=feature)
    return base


def _eos_token_ids(model: Any, config: Any, text: Any) -> tuple[int, ...]:
    """Every id that ends an answer: generation_config's and the configuration's, sorted."""
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    ids: set[int] = set()
    for holder in (generation, config, text):
        eos = getattr(holder, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return tuple(sorted(ids))


def _max_model_len(text: Any, asked: int) -> int:
    own = next(
        (int(v) for n in ("max_position_embeddings", "n_positions", "max_seq_len") if (v := getattr(text, n, None))), 0
    )
    _require(asked >= 0 and (own == 0 or asked <= own), "max_model_len", asked, f"0 (the model's own) to {own}")
    _require(asked > 0 or own > 0, "max_model_len", asked, "above 0: the model's configuration names no limit")
    return asked or own


def _require(ok: bool, key: str, value: Any, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{key} is {value!r}, must be {expected}", key=key, value=value, expected=expected)


def _unreadable(path: str | Path, error: Exception) -> ConfigError:
    expected = "a folder in Hugging Face format, a .gguf file, or a hub id that can be reached"
    return ConfigError(
        f"model is {str(path)!r}, must be {expected}: {_first_line(error)}",
        key="model",
        value=str(path),
        expected=expected,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
