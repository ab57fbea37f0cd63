"""Which NUMA node memory is taken from, by set_mempolicy(2) under its raw number: libnuma need not be installed.

The policy is MPOL_PREFERRED: while the node has memory it comes from there, then from the others. MPOL_BIND would have
the kernel kill the process, or another one of the node, rather than use memory that is free elsewhere. A policy is a
thread's own and passes to threads that it starts; pages follow the thread that first writes them, those of the KV
pool too (tmpfs asks the writer's policy). Pages of files, which weights may be, lie where whoever read them first had
them.
"""

import ctypes
import os
import platform
import re
from collections.abc import Collection
from pathlib import Path

from distserve.errors import ConfigError
from distserve.transport.rdma.ports import SYS, numa_of

_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_NUMBERS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy: the kernel's unistd tables
_WORDS, _BITS = 16, 64 * 16  # a mask of 1024 nodes, as many as a kernel can be built for


def online_nodes(sys_root: Path = SYS) -> list[int]:
    """Ids of this machine's nodes; [] where the kernel has none."""
    names = (path.name for path in (sys_root / "devices/system/node").glob("node*"))
    return sorted(int(name[4:]) for name in names if re.fullmatch(r"node\d+", name))


def node_for(wanted: str, cpus: Collection[int], key: str, sys_root: Path = SYS) -> int:
    """The node that a setting `auto`, `-1` or a number names; -1: leave it to the kernel. `auto` is the node of all of
    `cpus`, of a machine that has several. Raises ConfigError, which names `key`, for a node that is not there."""
    nodes = online_nodes(sys_root)
    if wanted == "auto":
        node = numa_of(cpus, sys_root) if cpus and len(nodes) > 1 else None
        return -1 if node is None else node
    if int(wanted) >= 0 and int(wanted) not in nodes:
        known = ", ".join(map(str, nodes)) or "none"
        raise ConfigError(
            f"{key} is {wanted}, must be auto, -1 or a node of this machine ({known})",
            key=key,
            value=wanted,
            expected=f"auto, -1 or one of {known}",
        )
    return int(wanted)


def prefer(node: int) -> str:
    """Take this thread's memory, and that of threads it starts from now on, from `node`. Returns why that can't be had,
    empty if it is so now."""
    if platform.machine() not in _NUMBERS:
        return f"the number of set_mempolicy on {platform.machine()} is not known here"
    mask = (ctypes.c_ulong * _WORDS)()
    mask[node // 64] = 1 << node % 64
    # The kernel takes one bit off the count that it is given.
    if _syscall(0, ctypes.c_int(_MPOL_PREFERRED), mask, ctypes.c_ulong(_BITS + 1)) == 0:
        return ""
    error = ctypes.get_errno()
    why = os.strerror(error)
    hints = {
        1: "a container's seccomp profile forbids set_mempolicy: give it CAP_SYS_NICE",
        22: "the control group's cpuset.mems leaves it out",
    }
    return f"{why} ({hints[error]})" if error in hints else why


def preferred() -> int:
    """The node that this thread's memory is taken from; -1: the kernel's default, the nearest."""
    if platform.machine() not in _NUMBERS:
        return -1
    mode, mask = ctypes.c_int(_MPOL_DEFAULT), (ctypes.c_ulong * _WORDS)()
    done = _syscall(1, ctypes.byref(mode), mask, ctypes.c_ulong(_BITS), ctypes.c_ulong(0), ctypes.c_ulong(0))
    if done != 0 or mode.value != _MPOL_PREFERRED:
        return -1
    return next((64 * i + (word & -word).bit_length() - 1 for i, word in enumerate(mask) if word), -1)


def _syscall(which: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(ctypes.c_long(_NUMBERS[platform.machine()][which]), *arguments))
