"""What the lab says is missing, and what it takes for granted."""

import sys
from pathlib import Path

import pytest
from roce_lab import packages
from roce_lab.errors import LabError


def program(folder: Path, name: str, content: bytes = b"\x7fELF static") -> None:
    (folder / name).write_bytes(content)
    (folder / name).chmod(0o755)


@pytest.fixture
def everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has all there must be."""
    for name in packages.COMMANDS:
        program(tmp_path, name)
    monkeypatch.setattr(packages, "_SYSTEM_PATH", str(tmp_path))
    monkeypatch.setattr(packages, "FILES", {str(tmp_path / "pyverbs"): "python3-pyverbs"})
    (tmp_path / "pyverbs").touch()
    return tmp_path


def test_nothing_is_asked_for_where_everything_is(everything: Path) -> None:
    packages.require(install=False)


def test_one_line_installs_all_that_is_missing(everything: Path) -> None:
    for name in ("qemu-system-x86_64", "tc", "ip", "pyverbs"):
        (everything / name).unlink()
    with pytest.raises(LabError, match=r"apt-get install .* iproute2 python3-pyverbs qemu-system-x86$"):
        packages.require(install=False)


def test_a_busybox_that_needs_libraries_will_not_do(everything: Path) -> None:
    program(everything, "busybox", Path(sys.executable).resolve().read_bytes()[:4096])
    assert packages.missing() == ["busybox-static"]
