"""The machine that the client runs on, as figures depend on it (Linux, /proc)."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def hardware() -> dict[str, str]:
    """In words."""
    info = dict(_pairs("/proc/cpuinfo"))
    flags = [f for f in _FLAGS if f in info.get("flags", "").split()]
    model = info.get("model name") or platform.processor() or platform.machine()
    numbers = {"family": info.get("cpu family"), "model": info.get("model")}
    details = ", ".join(f"{name} {number}" for name, number in numbers.items() if number)
    memory = dict(_pairs("/proc/meminfo")).get("MemTotal", "0").split()[0]
    found = {
        "CPU": model + (f" ({details})" if details else "") + (f", {' '.join(flags)}" if flags else ""),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{int(memory) / 2**20:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
    }
    if gpus := _gpus():
        found["GPUs"] = gpus
    return found


def _gpus() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(line.strip() for line in done.stdout.splitlines() if line.strip())


def _pairs(path: str) -> Iterator[tuple[str, str]]:
    try:
        text = Path(path).read_text()
    except OSError:
        return
    for line in text.splitlines():
        name, found, value = line.partition(":")
        if found:
            yield name.strip(), value.strip()
