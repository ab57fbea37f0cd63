"""What processes leave behind is seen: themselves, their children, their shared memory."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distserve.leftovers import Holdings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> subprocess.Popen[str]:
        code = textwrap.dedent(code) + "\nprint('ready', flush=True); time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10)


def test_a_live_process_is_left_and_a_dead_one_is_not(start: Start) -> None:
    process = start("import time")
    held = Holdings.of([process.pid])
    assert [line.startswith(f"process {process.pid} (") for line in held.left()] == [True]
    end(process)
    assert held.left() == []


def test_a_zombie_counts_as_gone(start: Start) -> None:
    process = start("import time")
    held = Holdings.of([process.pid])
    process.kill()
    deadline = time.monotonic() + 10
    while held.left() and time.monotonic() < deadline:  # not waited for: it stays a zombie
        time.sleep(0.01)
    assert held.left() == []
    assert Path(f"/proc/{process.pid}").exists()


def test_a_child_that_outlives_its_parent_is_left(start: Start) -> None:
    parent = start(
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    held = Holdings.of([parent.pid])
    assert len(held.processes) == 2
    end(parent)
    (orphan,) = set(held.processes) - {parent.pid}
    try:
        assert [line.split()[1] for line in held.left()] == [str(orphan)]
    finally:
        os.kill(orphan, 9)


def test_a_reused_pid_is_no_leftover(start: Start) -> None:
    process = start("import time")
    held = Holdings.of([process.pid])
    began, command = held.processes[process.pid]
    held.processes[process.pid] = (str(int(began) - 1), command)
    assert held.left() == []


def test_a_memfd_that_somebody_else_still_maps_is_left(start: Start) -> None:
    owner = start("import os, time; fd = os.memfd_create('pool'); os.ftruncate(fd, 4096)")
    held = Holdings.of([owner.pid])
    assert [name.split()[0] for name in held.segments.values()] == ["/memfd:pool"]
    fd = next(p for p in Path(f"/proc/{owner.pid}/fd").iterdir() if "memfd" in os.readlink(p))
    with fd.open("rb"):
        end(owner)
        assert held.left() == ["shared memory /memfd:pool (deleted)"]
    assert held.left() == []


def test_a_file_in_shared_memory_is_left_until_it_is_removed(start: Start) -> None:
    name = f"/dev/shm/distserve-test-{os.getpid()}"
    try:
        owner = start(f"import time; f = open({name!r}, 'wb'); f.write(b'x'); f.flush()")
        held = Holdings.of([owner.pid])
        end(owner)
        assert held.left() == [f"shared memory {name}"]
    finally:
        Path(name).unlink()
    assert held.left() == []
