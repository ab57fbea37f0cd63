"""GGUF to Hugging Face format: every weight in its place, and a tokenizer that splits as the file says."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from distserve.errors import ConfigError, FetchFailed, ModelUnsupported
from distserve.models.gguf import convert_gguf
from tests.unit.models.tiny_gguf import TEMPLATE, tokens, weights, write_gguf

HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{HF_NAMES[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def test_float32_weights_come_through_exactly(converted: Path) -> None:
    found = load_file(converted / "model.safetensors")
    expected = {hf_name(name): torch.from_numpy(tensor) for name, tensor in weights().items()}
    assert set(found) - {"lm_head.weight"} == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name


@pytest.mark.usefixtures("converter_here")
def test_quantised_weights_are_dequantised_to_bfloat16(tmp_path: Path) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "q.gguf", quantized=True), tmp_path)
    found = load_file(folder / "model.safetensors")
    for name, tensor in weights().items():
        if tensor.ndim == 2:
            packed = quantize(tensor, GGMLQuantizationType.Q8_0)
            tensor = dequantize(packed, GGMLQuantizationType.Q8_0).reshape(tensor.shape)
        assert torch.equal(found[hf_name(name)], torch.from_numpy(np.ascontiguousarray(tensor)).bfloat16()), name


def test_the_folder_loads_like_any_other(converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.generation_config.eos_token_id == 2
    assert model.generation_config.bos_token_id == 1
    assert model.config.max_position_embeddings == 512
    assert not hasattr(model.config, "quantization_config")
    assert model(torch.tensor([[1, 5, 9]])).logits.isfinite().all()


@pytest.mark.usefixtures("converter_here")
def test_numbers_are_split_as_the_file_says(converted: Path, tmp_path: Path) -> None:
    names = tokens()
    split = Tokenizer.from_file(str(converted / "tokenizer.json")).encode(" the 1234").ids
    assert [names[i] for i in split] == ["Ġthe", "Ġ", "1", "2", "3", "4"]
    gpt2 = convert_gguf(write_gguf(tmp_path / "gpt2.gguf", pre="gpt-2"), tmp_path)
    whole = Tokenizer.from_file(str(gpt2 / "tokenizer.json")).encode(" the 1234").ids
    assert [names[i] for i in whole] == ["Ġthe", "Ġ", "12", "34"]


def test_transformers_and_tokenizers_read_the_same_tokenizer(converted: Path) -> None:
    bare = Tokenizer.from_file(str(converted / "tokenizer.json"))
    fast = AutoTokenizer.from_pretrained(converted)
    for text in ("in the re12", "<|im_start|>user\nhi 34<|im_end|>", "héllo 日本\r\n\t 🙂", ""):
        ids = bare.encode(text).ids
        assert fast(text)["input_ids"] == ids
        assert bare.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_and_template_are_set(converted: Path) -> None:
    config = json.loads((converted / "tokenizer_config.json").read_text("utf-8"))
    assert config["eos_token"] == config["pad_token"] == "<|im_end|>"
    assert config["bos_token"] == "<|im_start|>"
    assert config["add_bos_token"] is False
    assert config["chat_template"] == TEMPLATE
    assert config["model_max_length"] == 512


@pytest.mark.usefixtures("converter_here")
def test_bos_comes_first_where_the_file_says_so(tmp_path: Path) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "bos.gguf", add_bos=True), tmp_path)
    bare = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert bare.encode("a").ids == [1, *bare.encode("a", add_special_tokens=False).ids]
    assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"] == bare.encode("a").ids


@pytest.mark.usefixtures("converter_here")
def test_an_unknown_split_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="odd-splitter") as e:
        convert_gguf(write_gguf(tmp_path / "odd.gguf", pre="odd-splitter"), tmp_path)
    assert e.value.feature == "pre-tokenizer odd-splitter"


@pytest.mark.usefixtures("converter_here")
def test_a_second_conversion_returns_at_once_and_another_file_gets_another_folder(
    tiny_gguf: Path, converted: Path, tmp_path: Path
) -> None:
    cache = converted.parent.parent
    said: list[str] = []
    assert convert_gguf(tiny_gguf, cache, said.append) == converted
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(tiny_gguf.read_bytes())
    assert convert_gguf(copy, cache, said.append) == converted
    assert said == []
    copy.write_bytes(tiny_gguf.read_bytes()[:-4] + b"\1\2\3\4")
    assert convert_gguf(copy, cache, said.append) != converted


def test_an_error_crosses_from_the_converters_process(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="odd-splitter") as e:
        convert_gguf(write_gguf(tmp_path / "odd.gguf", pre="odd-splitter"), tmp_path)
    assert e.value.model == "odd.gguf"


def test_files_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGML1234")
    with pytest.raises(ConfigError, match="does not begin as a GGUF file"):
        convert_gguf(tmp_path / "a.gguf", tmp_path)
    with pytest.raises(ConfigError, match="can't be read"):
        convert_gguf(tmp_path / "none.gguf", tmp_path)


@pytest.mark.usefixtures("converter_here")
def test_a_cut_file_fails_and_leaves_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(tiny_gguf.read_bytes()[:-2000])
    with pytest.raises((ModelUnsupported, FetchFailed), match=r"cut\.gguf"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path)
    assert [p.name for p in (tmp_path / "models").iterdir() if p.suffix != ".lock"] == []
