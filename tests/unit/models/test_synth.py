"""Random weights in the shape of known models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distserve.errors import ConfigError, FetchFailed, ModelNotFound
from distserve.models import synth as module
from distserve.models.resolve import resolve, tokenizer_folder
from distserve.models.synth import SHAPES, ModelShape, synth
from tests.tiny_models import make_tiny

TINY = ModelShape("qwen3", 2, 64, 128, 4, 2, 16, 400, 256, 1e4)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "llama")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(module, "_TIMEOUT_S", 120.0)


def quiet(line: str) -> None:
    pass


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "tiny"])
def test_the_number_of_parameters_is_that_of_the_model(name: str) -> None:
    """Of published sizes, in millions, as their names round them."""
    published = {"smollm2": 134.5, "llama-1b": 1235.8, "llama-8b": 8030.3, "llama-70b": 70553.7, "qwen3-8b": 8190.7}
    assert SHAPES[name].num_parameters / 1e6 == pytest.approx(published[name], rel=1e-3)


def test_it_is_a_model_like_any_other(tmp_path: Path, tokenizer: Path) -> None:
    import torch
    from tokenizers import Tokenizer

    from distserve.engine.model import load_model

    folder = synth(tmp_path / "made", "tiny", tokenizer=tokenizer, seed=3, report=quiet)
    assert resolve(folder) == folder
    assert tokenizer_folder(folder) == folder
    loaded = load_model(folder, dtype="auto", device="cpu")
    parameters = dict(loaded.model.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == pytest.approx(TINY.num_parameters, rel=0.01)
    assert loaded.dtype == "bfloat16"
    weights = parameters["model.layers.0.mlp.up_proj.weight"].float()
    assert weights.std().item() == pytest.approx(0.02, rel=0.1)
    texts = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert all(texts.decode([i], skip_special_tokens=False) for i in range(380, TINY.vocab_size))
    assert torch.equal(parameters["model.norm.weight"].float(), torch.ones(TINY.hidden_size))


def test_a_seed_makes_the_same_weights_again(tmp_path: Path, tokenizer: Path) -> None:
    def made(name: str, seed: int) -> bytes:
        folder = synth(tmp_path / name, "tiny", tokenizer=tokenizer, seed=seed, num_layers=1, report=quiet)
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
        return (folder / "model-00001.safetensors").read_bytes()

    first = made("a", 1)
    assert made("b", 1) == first
    assert made("c", 2) != first


def test_a_large_model_comes_in_shards(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distserve.models import synthesize

    monkeypatch.setattr(synthesize, "SHARD_BYTES", 40_000)
    folder = tmp_path / "sharded"
    folder.mkdir()
    synthesize.synthesize(module.asdict(TINY), 0, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder)  # complains of a tensor that is in no shard


def test_bad_input_is_named(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"no shape 'llama-9b', there are: .*llama-8b"):
        synth(tmp_path / "x", "llama-9b", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="exists: name one that does not"):
        synth(tokenizer, "tiny", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"has no tokenizer.json that could be read"):
        synth(tmp_path / "x", "tiny", tokenizer=tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": [["a", -1.0]]}}')
    with pytest.raises(ConfigError, match=r"whose vocabulary gives each token its id"):
        synth(tmp_path / "x", "tiny", tokenizer=tmp_path)
    monkeypatch.setitem(SHAPES, "small", ModelShape("llama", 1, 64, 64, 4, 2, 16, 100, 256, 1e4))
    with pytest.raises(ConfigError, match=r"tokens, small has 100: take a smaller one"):
        synth(tmp_path / "x", "small", tokenizer=tokenizer)
    monkeypatch.setitem(SHAPES, "huge", ModelShape("llama", 10**7, 8192, 8192, 64, 8, 128, 400, 256, 1e4))
    with pytest.raises(FetchFailed, match=r"huge takes .* GB free"):
        synth(tmp_path / "x", "huge", tokenizer=tokenizer)
    assert not (tmp_path / "x").exists()


def test_a_failure_leaves_nothing_and_says_why(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(FetchFailed, match=r"making tiny failed"):
        synth(tmp_path / "y", "tiny", tokenizer=tokenizer, seed=-1 << 70, report=quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["llama"]
