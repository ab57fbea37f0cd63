"""Real-time scheduling (sched(7)) of the threads that compute, and of no others.

Whoever computes under SCHED_FIFO or SCHED_RR runs until it waits for something: threads of the ordinary kind on the
same core get what is left. So the event loop, which holds leases and says that the worker lives, must have a core
elsewhere (isolation.py), never a priority: a real-time loop that spins would take the machine with it. And one core of
the machine stays free of real-time threads, so that somebody can always log in and end them.

The threads that compute are found by the name that Linux keeps of each: the engine's thread takes one, and threads that
it starts inherit it (libgomp's team, which comes and goes with the size of passes). Those of Python among them are not
the team's: they compile, or load.
"""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

EngineRole = Literal["prefill", "decode"]

PROC = Path("/proc")
ROLES: tuple[EngineRole, ...] = ("prefill", "decode")


def policy_name(role: EngineRole) -> str:
    """Prefill runs a pass to its end; decode workers that share cores take turns."""
    return "fifo" if role == "prefill" else "rr"


def thread_name(role: EngineRole) -> str:
    return f"engine-{role}"  # at most 15 bytes


def name_this_thread(role: EngineRole) -> None:
    """From now on threads that it starts have the name too."""
    with contextlib.suppress(OSError):
        (PROC / f"self/task/{threading.get_native_id()}/comm").write_text(thread_name(role))


def team(role: EngineRole) -> list[int]:
    """Ids of the threads of this process that compute, at this moment. For the engine's thread, which is one."""
    python = {t.native_id for t in threading.enumerate()} - {threading.get_native_id()}
    return [t.tid for t in _threads(PROC / "self", thread_name(role)) if t.tid not in python]


def refusal(role: EngineRole, priority: int, proc: Path = PROC) -> str:
    """Why threads of this process may not have that priority, and what would permit it; empty if they may. Tried on
    this thread, which is an ordinary one again when this returns."""
    if not hasattr(os, "sched_setscheduler"):
        return "this system has no sched_setscheduler"
    if _text(proc / "sys/kernel/sched_rt_runtime_us") == "0":
        return "kernel.sched_rt_runtime_us is 0: sysctl -w kernel.sched_rt_runtime_us=950000"
    try:
        os.sched_setscheduler(0, _policy(role), os.sched_param(priority))
    except OSError as e:
        return (
            f"{e.strerror}: it takes CAP_SYS_NICE, or a limit of at least {priority} (systemd: LimitRTPRIO={priority}; "
            f"ulimit -r {priority}; docker: --cap-add SYS_NICE or --ulimit rtprio={priority}); under version 1 of "
            "control groups the group's cpu.rt_runtime_us too"
        )
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return ""


def schedule(role: EngineRole, priority: int) -> str:
    """Give the team that priority, 0: none. Returns why it could not be, empty if it is so now."""
    policy = _policy(role) if priority else os.SCHED_OTHER
    for tid in team(role):
        try:
            os.sched_setscheduler(tid, policy, os.sched_param(priority))
        except ProcessLookupError:
            continue  # one of a larger team, gone meanwhile
        except OSError as e:
            return e.strerror or str(e)
    return ""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Where another worker of this machine computes. `realtime`: it has a real-time priority there."""

    pid: int
    role: EngineRole
    cpus: frozenset[int]
    realtime: bool


def neighbours(proc: Path = PROC) -> list[Neighbour]:
    """Other processes whose threads have the engines' names, as far as this one sees them: not in other containers."""
    found = []
    for folder in proc.iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        for role in ROLES:
            threads = list(_threads(folder, thread_name(role)))
            cpus = frozenset(cpu for t in threads for cpu in t.cpus)
            if cpus:
                found.append(Neighbour(int(folder.name), role, cpus, any(t.realtime for t in threads)))
    return found


def conflict(
    role: EngineRole, cpus: Iterable[int], loop: Iterable[int], others: Iterable[Neighbour], online: Iterable[int]
) -> str:
    """Why real-time threads of this role on these cores would be in the way; empty if they would not. Workers of one
    role may share cores. loop: the cores of this worker's event loop; online: all of the machine."""
    taken = set(cpus)
    for other in others:
        shared = ", ".join(map(str, sorted(other.cpus & set(cpus))))
        if shared and other.role != role:
            return (
                f"the {other.role} worker of pid {other.pid} computes on core {shared} too: give each cores of its own"
            )
        if other.realtime:
            taken |= other.cpus
    if taken.issuperset(online):
        return "no core of the machine would be left without real-time threads: leave one out of the sets"
    if taken.issuperset(loop):
        return "the event loop would have no core without real-time threads: leave it one that is in no role's cpus"
    return ""


@dataclass(frozen=True, slots=True)
class _Thread:
    tid: int
    cpus: frozenset[int]
    realtime: bool


def _threads(process: Path, name: str) -> Iterator[_Thread]:
    try:
        tasks = list((process / "task").iterdir())
    except OSError:
        return  # ended meanwhile
    for task in tasks:
        if _text(task / "comm") != name:
            continue
        tid = int(task.name)
        with contextlib.suppress(OSError):
            realtime = os.sched_getscheduler(tid) in (os.SCHED_FIFO, os.SCHED_RR)
            yield _Thread(tid, frozenset(os.sched_getaffinity(tid)), realtime)


def _policy(role: EngineRole) -> int:
    return os.SCHED_FIFO if role == "prefill" else os.SCHED_RR


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
