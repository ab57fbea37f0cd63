"""Who used the cores: our processes, and the others of the machine (Linux, /proc)."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

from distserve.bench.hardware import hardware

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def children(root: int) -> list[int]:
    """`root` and every process below it that lives now."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            below.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += below.get(pid, [])
    return found


def born(pid: int) -> int:
    """When it was started, in ticks of the machine: with its number, its identity. 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else 0


def memory_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes; what several of them map counts for each. Those that are gone count 0."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            continue
    return total


class PeakMemory:
    """`with` it: how far the memory of a process tree rises above what it is at the start, looked at every 50 ms by a
    thread."""

    def __init__(self, root: int) -> None:
        self._pids = children(root)
        self._idle = memory_bytes(self._pids)
        self._highest = self._idle
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def grown_bytes(self) -> int:
        return self._highest - self._idle

    def _watch(self) -> None:
        while not self._leave.wait(0.05):
            self._look()

    def _look(self) -> None:
        self._highest = max(self._highest, memory_bytes(self._pids))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._leave.set()
        self._thread.join(10)
        self._look()


def conditions() -> dict[str, str]:
    """The machine, in words: what a figure depends on."""
    return {
        **hardware(),
        "Python": platform.python_version(),
        "torch": version("torch"),
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


@dataclass(frozen=True, slots=True)
class Used:
    """Cores in use, on average over an interval. `by`: of each named group of processes; `others`: of everyone else,
    with what a hypervisor took away."""

    wall_s: float
    by: Mapping[str, float]
    others: float


class Meter:
    """CPU time of named groups of processes from here to used(). A process that begins later counts as an other."""

    def __init__(self, trees: Mapping[str, Iterable[int]], alone: Mapping[str, int] | None = None) -> None:
        """`trees`: processes with all below them; `alone`: single processes without their children."""
        self._pids = {name: [p for root in roots for p in children(root)] for name, roots in trees.items()}
        self._pids |= {name: [pid] for name, pid in (alone or {}).items()}
        self._began = self._read()

    def used(self) -> Used:
        (at, busy, by), (began, busy_then, by_then) = self._read(), self._began
        wall_s = max(1e-9, at - began)
        mine = {name: (by[name] - by_then[name]) / wall_s for name in by}
        return Used(wall_s, mine, max(0.0, (busy - busy_then) / wall_s - sum(mine.values())))

    def total_s(self, name: str) -> float:
        """CPU seconds of a group's processes since they were started."""
        return sum(map(_cpu_s, self._pids[name]))

    def _read(self) -> tuple[float, float, dict[str, float]]:
        return time.perf_counter(), _busy_s(), {n: sum(map(_cpu_s, pids)) for n, pids in self._pids.items()}


def _busy_s() -> float:
    """Seconds that all cores were busy, or stolen, since the start of the machine."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _stat(pid: int) -> list[str]:
    """The fields after the name, from the state on; [] if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []
