"""A worker's part of a GPU that several processes share: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of NVIDIA's MPS.

CUDA reads the variable when the process opens the GPU. It bounds how many of the multiprocessors the process's kernels
run on; which ones is for the driver to choose, they are not reserved, and memory and its bandwidth stay shared. Without
the MPS daemon the variable does nothing.
"""

import errno
import os
import socket
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT_PIPES = "/tmp/nvidia-mps"


def ask(env: MutableMapping[str, str], percentage: int, *, can_wait: bool = False) -> None:
    """Before CUDA starts. 0 leaves what the environment has. can_wait: where both have kernels to run, others' go first
    (MPS knows two priorities of clients, normal and below it)."""
    if percentage:
        env[PERCENTAGE] = str(percentage)
    if percentage and can_wait:
        env.setdefault(PRIORITY, "1")


def problem(env: Mapping[str, str]) -> str:
    """Why there is no MPS that this process would use, and what starts it; empty if there is one."""
    control = Path(env.get(PIPES, _DEFAULT_PIPES)) / "control"
    start = "nvidia-cuda-mps-control -d"
    try:
        if _listens(control):
            return ""
        return f"nobody listens on {control}: the MPS daemon has ended; {start}"
    except FileNotFoundError:
        return f"{control} is not there: no MPS daemon runs here ({start}), or {PIPES} names another folder"
    except OSError as e:
        return f"{control} can't be opened ({e.strerror}): the MPS daemon is another user's"


def _listens(control: Path) -> bool:
    """Whether the daemon reads it: a socket, or with older releases a named pipe."""
    if stat.S_ISSOCK(control.stat().st_mode):
        # The daemon's socket is of another type, which the kernel tells from one that nobody has (ECONNREFUSED): asked
        # in this way, the daemon sees no connection.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            found = probe.connect_ex(str(control))
        if found == errno.EACCES:
            raise PermissionError(found, os.strerror(found))
        return found in (0, errno.EPROTOTYPE)
    try:
        os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as e:
        if e.errno == errno.ENXIO:  # a pipe that nobody reads
            return False
        raise
    return True
