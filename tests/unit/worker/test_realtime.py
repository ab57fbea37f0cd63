"""Real-time priority of an engine's threads: when it is in somebody's way, and, where this process may, for real."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.worker import realtime
from distserve.worker.realtime import Neighbour, conflict

CORES = sorted(os.sched_getaffinity(0))


def worker(role: realtime.EngineRole, *cpus: int, realtime: bool = False) -> Neighbour:
    return Neighbour(7, role, frozenset(cpus), realtime)


@pytest.mark.parametrize(
    ("cpus", "loop", "others", "why"),
    [
        ((1, 2), (0, 3), [], ""),
        ((1, 2), (0,), [worker("decode", 3)], ""),
        ((1, 2), (0,), [worker("decode", 2, 3)], "the decode worker of pid 7 computes on core 2 too"),
        ((1, 2), (0,), [worker("decode", 0, 1, 2, 3)], "computes on core 1, 2 too"),  # one that floats
        ((1, 2), (0,), [worker("prefill", 1, 2, realtime=True)], ""),  # of its own kind
        ((0, 1, 2, 3), (), [], "no core of the machine"),
        ((1, 2), (0,), [worker("decode", 0, 3, realtime=True)], "no core of the machine"),
        ((1, 2), (3,), [worker("decode", 3, realtime=True)], "the event loop would have no core"),
        ((1, 2), (1, 2), [], "the event loop would have no core"),
    ],
)
def test_who_would_be_in_the_way(
    cpus: tuple[int, ...], loop: tuple[int, ...], others: list[Neighbour], why: str
) -> None:
    found = conflict("prefill", cpus, loop, others, range(4))
    assert (why in found) if why else found == ""


cpu_sets = st.frozensets(st.integers(0, 5), min_size=1)
neighbour = st.builds(Neighbour, st.just(7), st.sampled_from(realtime.ROLES), cpu_sets, st.booleans())


@given(cpu_sets, cpu_sets, st.lists(neighbour, max_size=3))
def test_real_time_never_takes_another_role_s_cores_nor_all_of_the_machine_nor_the_loop_s(
    cpus: frozenset[int], loop: frozenset[int], others: list[Neighbour]
) -> None:
    if conflict("decode", cpus, loop, others, range(6)):
        return
    taken = cpus.union(*(other.cpus for other in others if other.realtime))
    assert set(range(6)) - taken
    assert loop - taken
    assert not any(other.cpus & cpus for other in others if other.role == "prefill")


def test_a_kernel_that_gives_real_time_threads_no_time_is_told(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/sched_rt_runtime_us").write_text("0\n")
    assert "kernel.sched_rt_runtime_us is 0" in realtime.refusal("prefill", 1, tmp_path)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_process_that_may_not_is_told_what_would_permit_it() -> None:
    drop = (
        "import ctypes, os, resource; resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0));"
        "os.geteuid() or (os.setgid(65534), os.setuid(65534));"  # and with it all capabilities
        "from distserve.worker import realtime; print(realtime.refusal('decode', 12))"
    )
    said = run("import distserve.worker.realtime; " + drop)
    assert said.startswith("Operation not permitted: it takes CAP_SYS_NICE")
    assert "LimitRTPRIO=12" in said


ENGINE = """
import asyncio, ctypes, hashlib, os, threading
from concurrent.futures import ThreadPoolExecutor
from distserve.worker import realtime
LOOP, CORE = {loop}, {core}
os.sched_setaffinity(0, {{LOOP}})

def begin():
    os.sched_setaffinity(0, {{CORE}})
    realtime.name_this_thread("prefill")
    import torch  # its threads are the team, two on one core
    torch.set_num_threads(2)
    torch.ones(1 << 20).exp_()
    helper = threading.Thread(target=stop.wait, daemon=True)  # as one that compiles
    helper.start()
    assert realtime.schedule("prefill", 7) == ""
    return realtime.team("prefill")

stop = threading.Event()
engine = ThreadPoolExecutor(1)

async def main():
    loop = asyncio.get_running_loop()
    team = await loop.run_in_executor(engine, begin)
    {then}
    stop.set()

asyncio.run(main())
engine.shutdown()
"""


def may_be_real_time() -> bool:
    return not realtime.refusal("prefill", 7)


needs_permission = pytest.mark.skipif(
    not hasattr(os, "sched_setscheduler") or not may_be_real_time() or len(CORES) < 2,
    reason="no real-time priority for this process, or no core to leave out",
)


@needs_permission
def test_the_team_alone_gets_the_priority() -> None:
    then = """
    of = {int(tid): (os.sched_getscheduler(int(tid)), os.sched_getparam(int(tid)).sched_priority)
          for tid in os.listdir("/proc/self/task")}
    assert len(team) >= 2, team
    print({of[tid] for tid in team} == {(os.SCHED_FIFO, 7)}, {of[tid] for tid in set(of) - set(team)})
    """
    assert run(ENGINE.format(loop=CORES[-1], core=CORES[0], then=then)) == "True {(0, 0)}"


@needs_permission
def test_the_event_loop_runs_while_a_real_time_thread_does_not_let_go_of_its_core() -> None:
    then = """
    computing = loop.run_in_executor(engine, hashlib.pbkdf2_hmac, "sha256", b"x", b"y", 600_000)
    ticks = 0
    while not computing.done():
        await asyncio.sleep(0.001)
        ticks += 1
    print(os.sched_getscheduler(team[0]) == os.SCHED_FIFO and ticks >= 20)
    """
    assert run(ENGINE.format(loop=CORES[-1], core=CORES[0], then=then)) == "True"


@needs_permission
def test_another_worker_sees_where_it_computes_and_that_it_is_real_time() -> None:
    then = """
    import subprocess, sys
    look = (
        "import os; from distserve.worker import realtime;"
        "print([n for n in realtime.neighbours() if n.pid == os.getppid()])"
    )
    print(subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout.strip())
    """
    said = run(ENGINE.format(loop=CORES[-1], core=CORES[0], then=then))
    assert f"role='prefill', cpus=frozenset({{{CORES[0]}}}), realtime=True" in said


@needs_permission
def test_a_priority_is_taken_back() -> None:
    then = """
    await loop.run_in_executor(engine, realtime.schedule, "prefill", 0)
    print({os.sched_getscheduler(tid) for tid in team} == {os.SCHED_OTHER})
    """
    assert run(ENGINE.format(loop=CORES[-1], core=CORES[0], then=then)) == "True"
