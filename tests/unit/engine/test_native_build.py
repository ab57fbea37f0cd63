"""Compiling and keeping: once, by one process, whole or not at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distserve.engine.native.build import NativeUnavailable, library
from tests.cluster import wait_until


@pytest.fixture
def wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes each time it compiles, as CXX, and an empty cache."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "these tests need a C++ compiler"
    script = tmp_path / "cxx"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo compiled >> {tmp_path}/log\nexec {compiler} "$@" -O0\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("DISTSERVE_CACHE", str(tmp_path / "cache"))
    return script


def times_compiled(wrapper: Path) -> int:
    log = wrapper.parent / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def kept(wrapper: Path) -> list[str]:
    return sorted(p.suffix for p in (wrapper.parent / "cache" / "native").iterdir())


def test_the_second_time_it_is_found(wrapper: Path) -> None:
    library("bfloat16")
    library("bfloat16")
    assert times_compiled(wrapper) == 1
    assert kept(wrapper) == [".lock", ".so"]


def test_another_compiler_makes_another_one(wrapper: Path) -> None:
    library("bfloat16")
    wrapper.write_text(wrapper.read_text().replace("#!/bin/sh\n", '#!/bin/sh\n[ "$1" = --version ] && echo other\n'))
    library("bfloat16")
    assert times_compiled(wrapper) == 2


def test_two_processes_compile_once(wrapper: Path) -> None:
    code = "from distserve.engine.native.build import library; library('bfloat16')"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [p.wait(timeout=110) for p in processes] == [0, 0]
    assert times_compiled(wrapper) == 1


def test_a_process_that_ends_takes_its_compiler_and_what_that_started_with_it(wrapper: Path) -> None:
    started = wrapper.parent / "started"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nsleep 600 &\necho $$ $! > {started}.new\n'
        f"mv {started}.new {started}\nwait\n"
    )
    code = (
        "import pathlib, threading, time\n"
        "from distserve.engine.native.build import library\n"
        "threading.Thread(target=library, args=('bfloat16',), daemon=True).start()\n"
        f"while not pathlib.Path({str(started)!r}).exists(): time.sleep(0.02)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    for pid in started.read_text().split():
        wait_until(lambda pid=pid: not runs(pid), 10, f"process {pid} has ended")  # type: ignore[misc]


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_compiler_that_fails_says_why_and_leaves_nothing(wrapper: Path) -> None:
    wrapper.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "cxx: out of everything" >&2\nexit 1\n')
    with pytest.raises(NativeUnavailable, match="out of everything"):
        library("bfloat16")
    assert kept(wrapper) == [".lock"]


def test_a_cache_that_cannot_be_written(wrapper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DISTSERVE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(NativeUnavailable, match="can't be kept"):
        library("bfloat16")


def test_a_damaged_file_is_made_again(wrapper: Path) -> None:
    library("bfloat16")
    (made,) = (wrapper.parent / "cache" / "native").glob("*.so")
    made.write_bytes(made.read_bytes()[:100])
    code = "from distserve.engine.native.build import library; library('bfloat16')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)  # this process has the whole one mapped
    assert times_compiled(wrapper) == 2


def test_what_others_may_write_is_not_loaded(wrapper: Path) -> None:
    library("bfloat16")
    (made,) = (wrapper.parent / "cache" / "native").glob("*.so")
    made.chmod(0o777)
    with pytest.raises(NativeUnavailable, match="others may write"):
        library("bfloat16")
