"""Signals and the end of a process, with real processes and real signals."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

from distserve.lifecycle import Shutdown, new_id, run_service

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Run Python text as a process; it is gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


SERVICE = """
    import asyncio, time
    from distserve.lifecycle import Shutdown, run_service

    async def serve(shutdown):
        print("up", flush=True)
        await shutdown.wait()
        print(f"draining {shutdown.remaining_s() > 29}", flush=True)
        %s
        print("done", flush=True)

    run_service(serve, grace_s=30)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_the_process_ends_well(start: Start, signum: signal.Signals) -> None:
    process = start(SERVICE % "await asyncio.sleep(0.01)")
    assert first_line(process) == "up"
    process.send_signal(signum)
    out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == ("draining True\ndone\n", "", 0)


@pytest.mark.parametrize("stuck", ["await asyncio.sleep(60)", "await asyncio.to_thread(time.sleep, 60)"])
def test_a_second_signal_ends_it_at_once(start: Start, stuck: str) -> None:
    process = start(SERVICE % stuck)
    assert first_line(process) == "up"
    process.send_signal(signal.SIGTERM)
    assert first_line(process) == "draining True"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("", 130)


def test_an_error_of_the_service_comes_out() -> None:
    async def serve(shutdown: Shutdown) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_service(serve, grace_s=1)


async def test_the_grace_time_runs_from_the_first_request() -> None:
    shutdown = Shutdown(grace_s=5.0)
    assert shutdown.remaining_s() == 5.0
    shutdown.request()
    await asyncio.wait_for(shutdown.wait(), 1)
    assert 4.0 < shutdown.remaining_s() <= 5.0


async def test_work_is_run_until_it_finishes_or_leaving_is_asked_for() -> None:
    shutdown = Shutdown(grace_s=1.0)
    assert await shutdown.run_until_requested(asyncio.sleep(0)) is True

    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await shutdown.run_until_requested(fails())
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            shutdown.request()
            await asyncio.sleep(60)
        finally:
            ended.set()

    assert await asyncio.wait_for(shutdown.run_until_requested(waits()), 5) is False
    assert ended.is_set()


def gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


PARENT = """
    import os, subprocess, sys, time
    child = "import os, sys, time; from distserve.lifecycle import die_with; die_with(int(sys.argv[1]));"
    child += "print(os.getpid(), flush=True); time.sleep(60)"
    subprocess.Popen([sys.executable, "-c", child, str(os.getpid() + %d)])
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_dies_with_a_parent_that_was_killed(start: Start) -> None:
    parent = start(PARENT % 0)
    child = int(first_line(parent))
    os.kill(child, 0)
    parent.kill()
    assert gone(child)


def test_a_child_whose_parent_is_gone_already_ends_itself(start: Start) -> None:
    child = start("import os; from distserve.lifecycle import die_with; die_with(os.getppid() + 1); print('alive')")
    out, _ = child.communicate(timeout=20)
    assert (out, child.returncode) == ("", 1)


def test_ids_name_the_role_and_differ() -> None:
    ids = {new_id("prefill") for _ in range(100)}
    assert len(ids) == 100
    assert all(i.startswith("prefill-") for i in ids)
