"""Tiny models and their references, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_models import KINDS, Kind, make_tiny
from tests.unit.engine.engine_driver import Engine, Reference


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    folders: dict[Kind, Path] = {}

    def folder(kind: Kind) -> Path:
        if kind not in folders:
            folders[kind] = make_tiny(kind, tmp_path_factory.mktemp("models") / kind)
        return folders[kind]

    return folder


# Kinds whose small passes can run compiled.
COMPILED: tuple[Kind, ...] = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture(scope="session", params=[*KINDS, *(f"{kind}-compiled" for kind in COMPILED)])
def pair(request: pytest.FixtureRequest, tiny_folder: Callable[[Kind], Path]) -> tuple[Engine, Reference]:
    """The engine and transformers on the same tiny model, for each kind in turn."""
    kind, _, compiled = request.param.partition("-")
    folder = tiny_folder(kind)
    return Engine.load_compiled(folder) if compiled else Engine.load(folder), Reference(folder)


@pytest.fixture(scope="session")
def llama(tiny_folder: Callable[[Kind], Path]) -> Engine:
    return Engine.load(tiny_folder("llama"))
