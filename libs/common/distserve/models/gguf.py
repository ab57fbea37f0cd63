"""GGUF files become Hugging Face folders, in a process of their own: the caller needs no torch and keeps no memory."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from distserve.errors import ConfigError, FetchFailed
from distserve.models.cache import is_complete, making, models_folder, publish, write_manifest
from distserve.models.child import run_module

_CONVERT_TIMEOUT_S = 3600.0
_SAMPLE_BYTES = 1 << 20


def convert_gguf(path: Path, cache: Path | None = None, report: Callable[[str], None] = print) -> Path:
    """The cached folder made from the GGUF file `path`, made now if there is none.

    Weights become bfloat16, or float32 and float16 where the file has them so. Raises ConfigError (no such file),
    ModelUnsupported (its architecture or tokenizer), FetchFailed (stage "convert" or "disk").
    """
    path = path.absolute()
    identity = _identity(path)
    folder = models_folder(cache) / f"{path.stem}-{identity[:12]}"
    if is_complete(folder, identity):
        return folder
    try:
        with making(folder, report) as scratch:
            if not is_complete(folder, identity):
                started = time.monotonic()
                report(f"converting {path.name} (once)")
                made = scratch / "made"
                versions = run_converter(path, made, path.name)
                write_manifest(made, name=path.stem, source=path.name, source_sha256=identity, versions=versions)
                publish(made, folder)
                report(f"done in {time.monotonic() - started:.0f} s: {folder}")
    except OSError as e:
        raise FetchFailed(
            f"{e.strerror or e} while writing {e.filename or folder} (DISTSERVE_CACHE names another folder)",
            model=path.name,
            stage="disk",
        ) from e
    return folder


def run_converter(gguf: Path, folder: Path, name: str) -> dict[str, str]:
    """Run convert.py in a process of its own; returns the versions of what did it."""
    return run_module(
        "distserve.models.convert",
        [str(gguf), str(folder)],
        f"converting {gguf.name}",
        model=name,
        timeout_s=_CONVERT_TIMEOUT_S,
    )


def _identity(path: Path) -> str:
    """sha256 over size, head and tail of the file: enough to tell models apart without reading gigabytes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            head = file.read(_SAMPLE_BYTES)
            file.seek(max(0, size - _SAMPLE_BYTES))
            tail = file.read(_SAMPLE_BYTES)
    except OSError as e:
        raise ConfigError(
            f"model is {path}, which can't be read ({e.strerror}): name a GGUF file",
            key="model",
            value=str(path),
            expected="a GGUF file",
        ) from e
    if head[:4] != b"GGUF":
        raise ConfigError(
            f"model is {path}, which does not begin as a GGUF file does",
            key="model",
            value=str(path),
            expected="a GGUF file",
        )
    return hashlib.sha256(size.to_bytes(8, "little") + head + tail).hexdigest()
