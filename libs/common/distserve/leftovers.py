"""Did everything go? What some processes hold (themselves, their children, shared memory), and what is left of it.

Linux: read from /proc. Take it while they run, look again after they were stopped.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

PROC = Path("/proc")


@dataclass(slots=True)
class Holdings:
    """processes: pid -> (start time in clock ticks, command); with the start time a reused pid isn't mistaken.
    segments: (device, inode) -> name of every shared-memory file or memfd that they map or hold open."""

    processes: dict[int, tuple[str, str]] = field(default_factory=dict)
    segments: dict[tuple[int, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, pids: Iterable[int]) -> Self:
        """What these processes and all that descend from them hold now."""
        found = cls()
        for pid in _with_descendants(set(pids)):
            if identity := _identity(pid):
                found.processes[pid] = identity
                found.segments |= dict(_segments(pid))
        return found

    def left(self) -> list[str]:
        """A line for each process that still runs, and each segment that lies in /dev/shm or that somebody holds."""
        lines = [
            f"process {pid} ({identity[1]})" for pid, identity in self.processes.items() if _identity(pid) == identity
        ]
        alive: dict[tuple[int, int], str] = {}
        for pid in _pids():
            alive |= dict(_segments(pid))
        for path in _files(Path("/dev/shm")):
            try:
                stat = path.stat()
            except OSError:
                continue
            alive[stat.st_dev, stat.st_ino] = str(path)
        lines += [f"shared memory {name}" for key, name in self.segments.items() if key in alive]
        return lines


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _pids() -> list[int]:
    return [int(p.name) for p in PROC.iterdir() if p.name.isdigit()]


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on (state, ppid, …): the second may hold spaces and brackets."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _identity(pid: int) -> tuple[str, str] | None:
    fields = _stat_fields(pid)
    if not fields or fields[0] in "ZX":  # a zombie holds nothing but its number
        return None
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    return fields[19], command[:120]


def _with_descendants(pids: set[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid in _pids():
        if fields := _stat_fields(pid):
            children.setdefault(int(fields[1]), []).append(pid)
    todo, found = list(pids), set(pids)
    while todo:
        for child in children.get(todo.pop(), []):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def _segments(pid: int) -> Iterator[tuple[tuple[int, int], str]]:
    """Shared memory that a process maps or holds open. Another user's process can't be read: it holds none of ours."""
    for folder in ("map_files", "fd"):
        for link in _files(PROC / str(pid) / folder):
            try:
                name = os.readlink(link)
                if name.startswith(("/memfd:", "/dev/shm/")):
                    stat = link.stat()
                    yield (stat.st_dev, stat.st_ino), name
            except OSError:
                continue
