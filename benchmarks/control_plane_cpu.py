"""CPU seconds of processes and of the machine, from /proc."""

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_s(pid: int) -> float:
    """CPU seconds of a process's living threads, user and system, to the microsecond where the kernel keeps that
    (schedstat), else to the clock tick. Raises OSError if it is gone."""
    try:
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        if threads:
            return sum(int(text.split()[0]) for text in threads) / 1e9
    except FileNotFoundError:  # a thread has ended meanwhile
        pass
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def busy_s() -> float:
    """CPU seconds that all cores together were busy since boot."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle, iowait = fields[3], fields[4]
    return (sum(fields) - idle - iowait) / _TICKS_PER_S


def own_s() -> float:
    return time.process_time()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


class Usage:
    """What a process spends from now on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._at_start_s = process_s(pid)

    def spent_s(self) -> float:
        return process_s(self._pid) - self._at_start_s
