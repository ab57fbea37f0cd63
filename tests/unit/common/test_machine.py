"""What may be used of a machine, read from trees as kernels lay them out."""

import os
from pathlib import Path

import pytest

from distserve.machine import available_bytes, usable_cores

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {16 * GIB // 1024} kB\n"} | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_groups_it_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path, {})) == 16 * GIB


def v2(path: str, limit: int | str, used: int, inactive: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file 5\n",
    }


def test_a_group_leaves_its_limit_less_what_it_uses_and_cannot_give_back(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n"} | v2("/a/b", 4 * GIB, 3 * GIB, 2 * GIB)
    assert available_bytes(tree(tmp_path, files)) == 3 * GIB


def test_a_group_above_may_be_tighter(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n"} | v2("/a/b", "max", 1 * GIB) | v2("/a", 2 * GIB, GIB)
    assert available_bytes(tree(tmp_path, files)) == GIB


def test_in_a_container_the_hosts_path_is_not_there_and_the_root_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/system.slice/docker-1.scope\n"} | v2("", GIB, GIB // 4)
    assert available_bytes(tree(tmp_path, files)) == GIB - GIB // 4


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n"} | v2("", GIB, 2 * GIB)
    assert available_bytes(tree(tmp_path, files)) == 0


def test_version_1_groups(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/box"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n",
        f"{folder}/memory.limit_in_bytes": str(2 * GIB),
        f"{folder}/memory.usage_in_bytes": str(GIB),
        f"{folder}/memory.stat": f"total_inactive_file {GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
    }
    assert available_bytes(tree(tmp_path, files)) == GIB + GIB // 2


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
    assert set(usable_cores()) <= os.sched_getaffinity(0)


@pytest.mark.parametrize(("quota", "num"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_a_quota_pays_for_fewer_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, num: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": quota}
    assert usable_cores(tree(tmp_path, files)) == tuple(range(num))


def test_a_version_1_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7})
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/box\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert usable_cores(tree(tmp_path, files)) == (4, 5)
