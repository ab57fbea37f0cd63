"""Models of any size with random weights: what a shape's speed is can be measured without downloading it.

The weights are made in a process of its own (synthesize.py), which alone needs torch.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distserve.errors import ConfigError, FetchFailed, ModelNotFound
from distserve.models.cache import write_manifest
from distserve.models.child import run_module

_TIMEOUT_S = 3600.0
_TOKENIZER_FILES = ("tokenizer_config.json", "chat_template.jinja")  # and tokenizer.json, filled up


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer as transformers' `model_type` describes it."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rope_theta: float
    tied: bool = False  # the head is the embedding

    @property
    def num_parameters(self) -> int:
        width = self.hidden_size
        attention = 2 * width * self.head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * width * self.intermediate_size + 2 * width
        return self.num_layers * layer + (1 if self.tied else 2) * self.vocab_size * width + width


# As their published configurations have it.
SHAPES = {
    "smollm2": ModelShape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, tied=True),
    "llama-1b": ModelShape("llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, tied=True),
    "llama-8b": ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5),
    "llama-70b": ModelShape("llama", 80, 8192, 28672, 64, 8, 128, 128256, 131072, 5e5),
    "qwen3-8b": ModelShape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e6),
}


def synth(
    folder: Path,
    like: str,
    *,
    tokenizer: Path,
    num_layers: int = 0,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> Path:
    """Make `folder`: weights of a shape of SHAPES in bfloat16, drawn from N(0, 0.02^2) by `seed` on the device at hand
    (equal again only on one of the same kind), norms 1; and the tokenizer of the model folder `tokenizer`, in which ids
    that it lacks get a text. num_layers: 0: the shape's.

    Raises ModelNotFound for another shape, ConfigError for a folder that exists or a tokenizer that does not, or that
    has more tokens than the model, FetchFailed (stage "disk": no room, or "convert": torch is missing or failed).
    """
    if like not in SHAPES:
        known = ", ".join(sorted(SHAPES))
        raise ModelNotFound(f"there is no shape {like!r}, there are: {known}", param="like", value=like, expected=known)
    shape = SHAPES[like]
    spec = asdict(shape) | ({"num_layers": num_layers} if num_layers else {})
    num_bytes = 2 * ModelShape(**spec).num_parameters
    filled = _filled_up(tokenizer, shape.vocab_size, like)
    _check(folder, like, num_bytes)
    report(
        f"{like}, {spec['num_layers']} layers: {num_bytes / 2e9:.2f} billion random weights, {num_bytes / 1e9:.1f} GB"
    )
    scratch = Path()
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}-"))
        scratch.chmod(0o755)
        arguments = [json.dumps(spec), str(seed), str(scratch)]
        versions = run_module(
            "distserve.models.synthesize", arguments, f"making {like}", model=like, timeout_s=_TIMEOUT_S
        )
        (scratch / "tokenizer.json").write_text(json.dumps(filled, ensure_ascii=False))
        for name in _TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, scratch / name)
        source = f"random weights, seed {seed}"
        write_manifest(scratch, name=folder.name, source=source, source_sha256="", versions=versions)
        os.rename(scratch, folder)
    except OSError as e:
        raise FetchFailed(f"{e.strerror or e} while writing {e.filename or folder}", model=like, stage="disk") from e
    finally:
        if scratch.name:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder.absolute()


def _filled_up(tokenizer: Path, vocab_size: int, like: str) -> dict[str, Any]:
    """tokenizer.json with a text for each id that the model may draw: `~id` where the tokenizer has none, so that a
    token is an event of a stream, as with a real model."""
    try:
        described: dict[str, Any] = json.loads((tokenizer / "tokenizer.json").read_text())
        known = described["model"]["vocab"]
        taken = {*known.values(), *(token["id"] for token in described.get("added_tokens", ()))}
        highest = max(taken)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise ConfigError(
            f"{tokenizer} has no tokenizer.json that could be read ({e}): name a model folder that has one, whose "
            "vocabulary gives each token its id (BPE, WordPiece)",
            key="tokenizer",
            value=str(tokenizer),
        ) from e
    if highest >= vocab_size:
        raise ConfigError(
            f"the tokenizer in {tokenizer} has {highest + 1} tokens, {like} has {vocab_size}: take a smaller one",
            key="tokenizer",
            value=highest + 1,
            expected=f"at most {vocab_size}",
        )
    known.update({f"~{i}": i for i in range(vocab_size) if i not in taken})
    return described


def _check(folder: Path, like: str, num_bytes: int) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists: name one that does not", key="folder", value=str(folder))
    parent = next(p for p in folder.absolute().parents if p.exists())
    if (free := shutil.disk_usage(parent).free) < num_bytes:
        raise FetchFailed(
            f"{like} takes {num_bytes / 1e9:.1f} GB, {parent} has {free / 1e9:.1f} GB free", model=like, stage="disk"
        )
