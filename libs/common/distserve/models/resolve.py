"""What a user may call a model, and what the engine and the gateway make of it."""

import re
from collections.abc import Callable
from pathlib import Path

from distserve.errors import ConfigError
from distserve.models.catalog import CATALOG
from distserve.models.fetch import fetch
from distserve.models.gguf import convert_gguf

_EXPECTED = "a name of the catalogue, a model folder, a GGUF file or a hub id"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


def resolve(spec: str | Path, cache: Path | None = None, report: Callable[[str], None] = print) -> Path | str:
    """A folder in Hugging Face format, or a hub id as it is.

    A catalogue name is fetched and a GGUF file converted if the cache lacks them; both are quick afterwards, so every
    service may call this with the same text. An existing path comes before a catalogue name, and that before a hub
    id. Raises ConfigError for anything else, and what fetch() and convert_gguf() raise.
    """
    text = str(spec)
    path = Path(text).expanduser()
    if path.is_file():
        return convert_gguf(path, cache, report)
    if (path / "config.json").is_file():
        return path.absolute()
    if text.lower() in CATALOG:
        return fetch(text, cache, report)
    if path.is_dir():
        raise _refused(text, f"a folder without config.json: expected {_EXPECTED}")
    if _HUB_ID.fullmatch(text) and path.suffix != ".gguf" and not text.startswith("."):
        return text
    raise _refused(text, f"which is not there: expected {_EXPECTED} (catalogue: {', '.join(sorted(CATALOG))})")


def tokenizer_folder(model: Path | str) -> Path:
    """The folder with tokenizer.json of what resolve() returned. Of a hub id only the tokenizer's files are
    downloaded, unless the hub's own cache has them. Needs no torch. Raises ConfigError."""
    folder = model if isinstance(model, Path) else _hub_tokenizer(model)
    if not (folder / "tokenizer.json").is_file():
        raise _refused(str(model), "which has no tokenizer.json: the gateway needs a fast tokenizer")
    return folder


def _hub_tokenizer(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_TOKENIZER_FILES)))
    except Exception as e:  # the hub client raises its own, HTTP's and the system's errors
        raise _refused(hub_id, f"whose tokenizer can't be had from the hub ({type(e).__name__}: {e})") from e


def _refused(text: str, why: str) -> ConfigError:
    return ConfigError(f"model is {text!r}, {why}", key="model", value=text, expected=_EXPECTED)
