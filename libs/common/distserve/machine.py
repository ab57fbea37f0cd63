"""What this process may use of its machine: memory and cores, within the limits of its control group; a cache folder.

Read from /proc and /sys/fs/cgroup as the kernel documents them (Documentation/admin-guide/cgroup-v2.rst and
cgroup-v1/memory.rst). `root` stands for `/` in tests.
"""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60  # cgroup v1 writes no limit as a huge number


def available_bytes(root: Path = ROOT) -> int:
    """Memory that can be taken without swapping or being killed: MemAvailable, or what the control group leaves."""
    left = [_mem_available(root), *_cgroup_left(root)]
    return max(0, min(left))


def usable_cores(root: Path = ROOT) -> tuple[int, ...]:
    """Ids of the cores this process may run on; as many of them as the group's CPU quota pays for, at least one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = min([float(len(cores)), *_cpu_quotas(root)])
    return tuple(cores[: max(1, int(quota))])


def online_cores(root: Path = ROOT) -> tuple[int, ...]:
    """Ids of every core of the machine, whoever may run on it; () where the kernel does not tell."""
    cores: set[int] = set()
    for part in filter(None, _text(root / "sys/devices/system/cpu/online").strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


def own_group(root: Path = ROOT) -> Path | None:
    """The folder of this process's control group in the unified hierarchy (version 2); None if memory is not its."""
    group = next(_groups(root, ""), None)
    return group if group is not None and (group / "memory.max").is_file() else None


def cache_folder() -> Path:
    """$DISTSERVE_CACHE, else $XDG_CACHE_HOME/distserve, else ~/.cache/distserve."""
    if own := os.environ.get("DISTSERVE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "distserve"


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("no MemAvailable in /proc/meminfo")


def _cgroup_left(root: Path) -> Iterator[int]:
    for group in _groups(root, ""):
        yield from _left(group, "memory.max", "memory.current", "inactive_file")
    for group in _groups(root, "memory"):
        yield from _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(group: Path, limit_name: str, used_name: str, reclaimable_name: str) -> Iterator[int]:
    limit, used = _number(group / limit_name), _number(group / used_name)
    if limit is None or used is None or limit >= _UNLIMITED:
        return
    # File cache that nobody uses counts as used, but the kernel gives it back before it kills anyone.
    yield limit - used + _stat(group / "memory.stat", reclaimable_name)


def _cpu_quotas(root: Path) -> Iterator[float]:
    for group in _groups(root, ""):
        fields = _text(group / "cpu.max").split()
        if len(fields) == 2 and fields[0] != "max":
            yield int(fields[0]) / int(fields[1])
    for group in _groups(root, "cpu"):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            yield quota / period


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's group and of every group above it; controller "" is the unified hierarchy (v2)."""
    base = root / "sys/fs/cgroup" / controller
    own = "/"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if (number == "0" and not controllers and not controller) or (
            controller and controller in controllers.split(",")
        ):
            own = path
    # In a container the group's path is often the host's, which isn't there: then the mount's root is the group.
    parts = [p for p in own.split("/") if p and p != ".."]
    for depth in range(len(parts), -1, -1):
        folder = base.joinpath(*parts[:depth])
        if folder.is_dir():
            yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _stat(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
