"""The most host memory that a worker may take, and what keeps it to that.

Counted is what only this process can give back: its private writable memory (heap, stacks, activations, weights that
are not read-only pages of a file; VmData of /proc/PID/status) and the KV pool, at its full size from the start. Not
counted are pages of files, which the kernel drops when it must, and memory that a device's driver has pinned.

The first bound is RLIMIT_DATA, of the limit less the pool (a shared mapping, which the kernel does not count there):
whoever asks for more is told so, the pass that asked fails, its sequences end in an error, and the worker lives on. Not
RLIMIT_AS: CUDA, and allocators too, reserve many times more addresses than they use. The second is memory.max of the
process's control group (version 2), where the process is alone in it and may write it: that counts every page, and
who reaches it after all is killed by the kernel.
"""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from distserve.errors import ConfigError
from distserve.machine import ROOT, own_group
from distserve.sizing import in_words


def private_bytes(root: Path = ROOT) -> int:
    """Of this process now, as RLIMIT_DATA counts."""
    for line in (root / "proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "VmData":
            return int(rest.split()[0]) * 1024
    raise OSError("no VmData in /proc/self/status")


def weight_bytes(model: Path) -> int:
    """Of a model's files, about what they take in memory; 0 for a model that is in no folder yet."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.is_dir() else 0


def require_room(limit: int, key: str, needed_bytes: Mapping[str, int]) -> None:
    """Raises ConfigError, which names the limit and each part, where the parts together are more. limit 0: none."""
    total = sum(needed_bytes.values())
    if not limit or total <= limit:
        return
    parts = ", ".join(f"{name.replace('_', ' ')} {in_words(size)}" for name, size in needed_bytes.items())
    raise ConfigError(
        f"{key} is {limit} ({in_words(limit)}), must be 0 or at least {in_words(total)} ({parts}), and what passes "
        "take beyond that; a smaller pool: kv.num_blocks",
        key=key,
        value=limit,
        expected=f"0 or at least {total}",
    )


def bind(limit: int, pool_bytes: int, root: Path = ROOT) -> tuple[str, str]:
    """Keep this process to `limit` from now on, of which its pool is pool_bytes.

    Returns what does (`rlimit`, or `rlimit and cgroup`) and why nothing does; one of them is empty.
    """
    try:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit - pool_bytes, hard))
    except (OSError, ValueError) as e:
        return "", f"RLIMIT_DATA can't be set: {e}"
    return ("rlimit and cgroup" if bind_group(limit, root) else "rlimit"), ""


def bind_group(limit: int, root: Path) -> bool:
    """memory.max of the group, if this process is alone in it; a lower one stays."""
    group = own_group(root)
    if group is None:
        return False
    try:
        alone = (group / "cgroup.procs").read_text().split() == [str(os.getpid())]
        present = (group / "memory.max").read_text().strip()
        if not alone or (present != "max" and int(present) <= limit):
            return False
        (group / "memory.max").write_text(str(limit))
    except (OSError, ValueError):
        return False
    return True
