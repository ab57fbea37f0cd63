"""The MPS daemon that `up` starts. The daemon here is a script that does what the real one does with its folder; the
real one runs in tests/gpu/test_mps.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from distserve.errors import ConfigError
from distserve.own_mps import OwnMps
from distserve.worker import mps
from tests.cluster import wait_until

Make = Callable[[str], str]

LISTENS = """
import os, signal, socket, sys, time
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
if "-f" not in sys.argv:
    assert sys.stdin.read() == "quit\\n"
    os.kill(int(open(pipe + "/pid").read()), signal.SIGTERM)
    sys.exit(0)
open(pipe + "/pid", "w").write(str(os.getpid()))
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(pipe + "/control")
s.listen()
signal.pause()
"""

REFUSES = """
import os, sys
open(os.environ["CUDA_MPS_LOG_DIRECTORY"] + "/control.log", "w").write("starting\\nno GPU was found\\n")
sys.exit(3)
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv(mps.PIPES, str(tmp_path / "nobody"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def script(text: str) -> str:
        path = tmp_path / "mps-control"
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
        return path.name

    return script


def ignore(_: str, line: str) -> None:
    pass


async def test_it_listens_inside_and_is_gone_afterwards(make: Make) -> None:
    said: list[str] = []
    async with OwnMps(lambda _, line: said.append(line), wanted=True, program=make(LISTENS)) as own:
        assert mps.problem(own.env) == ""
        folder, pid = Path(own.env[mps.PIPES]).parent, own.pid
        assert pid is not None
        assert said == [f"MPS: mps-control runs, process {pid}"]
    assert not folder.exists()
    assert own.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_one_that_ends_at_once_is_told_with_its_last_words(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"mps-control ended with status 3: no GPU was found") as caught:
        async with OwnMps(ignore, wanted=True, program=make(REFUSES)):
            pass
    assert caught.value.fields["key"] == "prefill.mps_percentage"


async def test_without_the_program_it_says_where_that_comes_from(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"no-such-program is not there: it comes with NVIDIA's driver"):
        async with OwnMps(ignore, wanted=True, program="no-such-program"):
            pass


async def test_nothing_is_started_where_none_is_wanted_or_one_runs_already(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make(LISTENS)
    async with OwnMps(ignore, wanted=False, program=program) as unwanted:
        assert (unwanted.env, unwanted.pid) == ({}, None)
    async with OwnMps(ignore, wanted=True, program=program) as first:
        for name, value in first.env.items():
            monkeypatch.setenv(name, value)
        async with OwnMps(ignore, wanted=True, program=program) as second:
            assert (second.env, second.pid) == ({}, None)
        assert mps.problem(first.env) == "", "somebody else's daemon was ended"


DIES = """
import asyncio, os, sys
from distserve.own_mps import OwnMps

async def main():
    async with OwnMps(lambda _, line: None, wanted=True, program=sys.argv[1]) as own:
        print(own.pid, flush=True)
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_it_dies_with_the_process_that_started_it(make: Make) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, make(LISTENS)], capture_output=True, text=True, timeout=30)
    assert done.returncode == -9
    pid = int(done.stdout)
    wait_until(lambda: not psutil.pid_exists(pid), 10, "the daemon's end")
