"""What loading tells of a model, and what it refuses, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3NextConfig,
    T5Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from distserve.engine.attention.hook import WindowMask, mask_kind, paged_attention
from distserve.engine.batching import Batch, Work
from distserve.engine.model import load_model
from distserve.errors import ConfigError, ModelUnsupported
from tests.tiny_models import EOS_ID, MAX_MODEL_LEN, VOCAB_SIZE, Kind, make_tiny
from tests.unit.engine.engine_driver import Engine, prompt_of
from tests.unit.models.tiny_gguf import write_gguf

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FACTORS = [1.0] * 8


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4}), "multi-head latent attention"),
        (Gemma3nTextConfig(), "KV shared between layers (num_kv_shared_layers=15)"),
        (JambaConfig(**SMALL), "state-space or linear-attention layers (model type jamba)"),
        (MambaConfig(vocab_size=64, hidden_size=64), "state-space or linear-attention layers (model type mamba)"),
        (Qwen3NextConfig(**SMALL), "state-space or linear-attention layers (model type qwen3_next)"),
        (
            LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "length-switching RoPE (rope_type=dynamic)",
        ),
        (
            Phi3Config(
                **SMALL,
                original_max_position_embeddings=256,
                rope_parameters={
                    "rope_type": "longrope",
                    "short_factor": FACTORS,
                    "long_factor": FACTORS,
                    "rope_theta": 1e4,
                },
            ),
            "length-switching RoPE (rope_type=longrope)",
        ),
        (T5Config(), "an encoder and a decoder"),
        (GptOssConfig(**SMALL), "attention sinks"),
        (Gemma3TextConfig(**SMALL, use_bidirectional_attention=True), "bidirectional attention"),
        (Llama4TextConfig(**SMALL), "chunked attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_refused_by_the_configuration_before_weights_are_read(config: Any, feature: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config.save_pretrained(folder)  # no weights there at all
    with pytest.raises(ModelUnsupported) as e:
        load_model(folder)
    assert e.value.feature.startswith(feature)
    assert e.value.model == "model"
    assert feature in e.value.message


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (BertConfig(**{**SMALL, "num_key_value_heads": None}), "bidirectional attention"),
        (FalconConfig(**SMALL), "attention that can't be replaced"),
    ],
    ids=["bert", "falcon"],
)
def test_refused_by_name_once_loaded(config: Any, feature: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelUnsupported) as e:
        load_model(tmp_path / "model")
    assert e.value.feature == feature


def test_a_model_that_takes_positions_from_the_input_s_length_is_refused(
    tiny_folder: Callable[[Kind], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right alone, silently wrong in a ragged batch: only the probe can tell."""
    real = LlamaRotaryEmbedding.forward

    def counts_itself(self: LlamaRotaryEmbedding, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return real(self, x, torch.arange(x.shape[1])[None])

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", counts_itself)
    with pytest.raises(ModelUnsupported, match="logits are off by"):
        load_model(tiny_folder("llama"))
    load_model(tiny_folder("llama"), probe=False)


def test_softcap_in_attention_is_honoured(tmp_path: Path) -> None:
    """Gemma 2 on top of a sliding window in every other layer, against eager attention (sdpa refuses softcaps)."""
    torch.manual_seed(0)
    config = Gemma2Config(**SMALL, head_dim=16, sliding_window=24, attn_logit_softcapping=0.5, query_pre_attn_scalar=16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=1.0 if "embed" in name else 0.4)
    model.save_pretrained(tmp_path / "gemma2")
    eager = AutoModelForCausalLM.from_pretrained(tmp_path / "gemma2", attn_implementation="eager")
    engine = Engine(load_model(tmp_path / "gemma2"), 30)
    sequence = engine.add(prompt_of(90))
    engine.step([sequence], chunk=50)
    sequence.block_table += [25, 26, 27]
    logits = engine.runner.forward_logits(Batch([Work(sequence, 50, 40, True)]))[0]
    with torch.inference_mode():
        wanted = eager(torch.tensor([prompt_of(90)])).logits[0, -1]
        config.attn_logit_softcapping = eager.config.attn_logit_softcapping = None
        for module in eager.modules():
            if hasattr(module, "attn_logit_softcapping"):
                module.attn_logit_softcapping = None
        uncapped = eager(torch.tensor([prompt_of(90)])).logits[0, -1]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-3)
    assert (uncapped - wanted).abs().max() > 0.1  # the cap bites


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**SMALL, num_local_experts=4),
        GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=256, eos_token_id=2),
        LlamaConfig(
            **SMALL,
            rope_parameters={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            },
        ),
    ],
    ids=["mixtral", "gpt2", "llama 3 rope"],
)
def test_other_causal_models_load_and_agree_with_their_own_attention(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    engine = Engine(load_model(tmp_path / "model"), 20)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    sequence = engine.add(prompt_of(60))
    engine.step([sequence], chunk=33)
    sequence.block_table.append(19)
    logits = engine.runner.forward_logits(Batch([Work(sequence, 33, 27, True)]))[0]
    with torch.inference_mode():
        wanted = stock(torch.tensor([prompt_of(60)])).logits[0, -1]
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-4)


def test_what_loading_tells(tiny_folder: Callable[[Kind], Path]) -> None:
    model = load_model(tiny_folder("qwen3"), dtype="bfloat16", block_size=8, max_model_len=100)
    assert (model.name, model.dtype, model.max_model_len) == ("qwen3", "bfloat16", 100)
    assert model.eos_token_ids == (EOS_ID,)
    assert (model.vocab_size, model.hidden_size) == (VOCAB_SIZE, 64)
    layout = model.layout
    assert (layout.dtype, layout.num_layers, layout.num_kv_heads, layout.head_dim) == ("bfloat16", 4, 2, 32)
    assert layout.block_size == 8
    assert json.loads(layout.rope)["rope_parameters"]["rope_theta"] == 10_000.0
    assert load_model(tiny_folder("qwen3")).dtype == "float32"  # "auto": as saved
    assert load_model(tiny_folder("qwen3")).max_model_len == MAX_MODEL_LEN


def test_every_eos_of_both_configurations_counts(tiny_folder: Callable[[Kind], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "copy")
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": [9, 5]}))
    assert load_model(folder).eos_token_ids == (EOS_ID, 5, 9)


def test_identity_is_of_the_weights_and_the_architecture(tiny_folder: Callable[[Kind], Path], tmp_path: Path) -> None:
    first = load_model(tiny_folder("llama")).layout
    copy = shutil.copytree(tiny_folder("llama"), tmp_path / "elsewhere")
    assert load_model(copy).layout == first
    assert load_model(make_tiny("llama", tmp_path / "other", seed=1)).layout.weights != first.weights
    settings = copy / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "rms_norm_eps": 1e-3}))
    assert load_model(copy).layout.weights != first.weights


def test_missing_weights_are_refused_instead_of_drawn_at_random(
    tiny_folder: Callable[[Kind], Path], tmp_path: Path
) -> None:

    copy = shutil.copytree(tiny_folder("llama"), tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights are missing or misshapen, model.layers.1.mlp.up_proj.weight"):
        load_model(copy)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"path": "/nowhere/model"}, "model"),
        ({"path": "/nowhere/model.gguf"}, "model"),
        ({"dtype": "int4"}, "dtype"),
        ({"block_size": 0}, "block_size"),
        ({"max_model_len": MAX_MODEL_LEN + 1}, "max_model_len"),
        ({"max_model_len": -1}, "max_model_len"),
    ],
)
def test_values_that_can_t_be_are_refused(
    arguments: dict[str, Any], key: str, tiny_folder: Callable[[Kind], Path]
) -> None:
    with pytest.raises(ConfigError) as e:
        load_model(**{"path": tiny_folder("llama"), **arguments})
    assert (e.value.key, e.value.value) == (key, arguments.get("path", arguments.get(key)))
    assert e.value.expected in e.value.message


def test_a_gguf_file_loads_like_a_folder(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf")
    engine = Engine(load_model(file, dtype="float32"), 20)
    assert engine.model.name == "small"
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32)
    prompt = [i % engine.model.vocab_size for i in prompt_of(40)]
    sequence = engine.add(prompt)
    engine.step([sequence], chunk=25)
    sequence.block_table.append(19)
    logits = engine.runner.forward_logits(Batch([Work(sequence, 25, 15, True)]))[0]
    with torch.inference_mode():
        torch.testing.assert_close(logits, stock(torch.tensor([prompt])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a folder with a config.json"):
        load_model(tmp_path)


def test_a_hub_id_that_can_t_be_reached_is_refused_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"model is 'nobody/no-such-model', must be .* a hub id that can be reached"):
        load_model("nobody/no-such-model")


@pytest.mark.parametrize(
    ("argument", "feature"),
    [
        ({"s_aux": torch.zeros(4)}, "attention argument s_aux"),
        ({"position_bias": torch.zeros(1)}, "attention argument position_bias"),
        ({"dropout": 0.1}, "attention dropout=0.1"),
        ({"is_causal": False}, "bidirectional attention"),
        ({"sliding_window": 4}, "attention argument sliding_window=4 under a mask of None"),
        ({"attention_mask": torch.ones(1, 1, 2, 2)}, "an attention mask of its own (Tensor)"),
        ({"paged": None}, "forward keywords that do not reach attention"),
    ],
)
def test_every_argument_of_attention_is_honoured_or_refused(
    llama: Engine, argument: dict[str, Any], feature: str
) -> None:
    module = llama.model.base.layers[0].self_attn
    query, key = torch.zeros(1, 4, 2, 16), torch.zeros(1, 2, 2, 16)
    given = {"attention_mask": None, "paged": object(), **argument}
    with pytest.raises(ModelUnsupported) as e:
        paged_attention(module, query, key, key, **given)
    assert (e.value.model, e.value.feature) == ("llama", feature)


def test_a_mask_says_its_kind_or_is_refused() -> None:
    config = LlamaConfig()
    config.sliding_window = 7
    assert mask_kind(config=config, q_length=3) is None
    assert mask_kind(config=config, local_size=7) == WindowMask(7)
    with pytest.raises(ModelUnsupported, match="chunked attention"):
        mask_kind(config=config, local_size=8)
    with pytest.raises(ModelUnsupported, match="a mask other than causal or sliding window"):
        mask_kind(config=config, use_vmap=True)
