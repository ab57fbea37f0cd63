"""The machine's checks on trees of files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from distserve.doctor import hardware
from tests.unit.doctor.trees import host

CPU = "sys/devices/system/cpu"


def test_kernel_and_modules(tmp_path: Path) -> None:
    assert hardware.check_kernel(host(tmp_path / "none")).status == "fail"
    files = {
        "proc/sys/kernel/osrelease": "6.1.0-40-amd64",
        "proc/modules": "rdma_rxe 155648 0 - Live 0x0\nib_core 434176 2 rdma_rxe - Live 0x0\next4 1 0 - Live 0x0\n",
        "sys/module/ib_uverbs/version": "1",  # built in: in no list of loaded modules
    }
    found = hardware.check_kernel(host(tmp_path, files))
    assert (found.status, found.measures["version"]) == ("ok", "6.1.0-40-amd64")
    assert found.found.endswith("RDMA modules: ib_core, ib_uverbs, rdma_rxe")


@pytest.mark.parametrize(
    ("governors", "status", "words"),
    [
        ([], "skip", "no cpufreq"),
        (["performance", "performance"], "ok", "all 2 cores"),
        (["performance", "powersave", "schedutil"], "warn", "powersave on 1, schedutil on 1 of 3 cores"),
    ],
)
def test_governor(tmp_path: Path, governors: list[str], status: str, words: str) -> None:
    files = {f"{CPU}/cpu{i}/cpufreq/scaling_governor": name for i, name in enumerate(governors)}
    found = hardware.check_governor(host(tmp_path, files | {f"{CPU}/cpufreq/policy0/scaling_governor": "powersave"}))
    assert found.status == status
    assert words in found.found
    assert found.mend == ("cpupower frequency-set -g performance" if status == "warn" else "")


@pytest.mark.parametrize(
    ("policy", "link", "status"),
    [
        ("", "0", "skip"),
        ("[default] performance powersave powersupersave", "0", "ok"),
        ("default [performance] powersave powersupersave", "0", "ok"),
        ("default performance [powersave] powersupersave", "0", "warn"),
        ("default performance powersave [powersupersave]", "0", "warn"),
        ("[default] performance powersave powersupersave", "1", "warn"),
    ],
)
def test_aspm(tmp_path: Path, policy: str, link: str, status: str) -> None:
    nic = "/sys/bus/pci/devices/0000:17:00.0"
    files = {f"{nic}/link/l1_aspm": link, f"{nic}/link/clkpm": "1"}
    if policy:
        files["sys/module/pcie_aspm/parameters/policy"] = policy
    found = hardware.check_aspm(host(tmp_path, files), [nic])
    assert found.status == status
    assert ("/sys/module/pcie_aspm/parameters/policy" in found.mend) == (status == "warn")


def numa_tree(root: Path, num_nodes: int, gpus: dict[str, int]) -> hardware.Host:
    files = {f"sys/devices/system/node/node{n}/cpulist": f"{n * 8}-{n * 8 + 7}" for n in range(num_nodes)}
    for address, node in gpus.items():
        folder = f"sys/bus/pci/devices/{address}"
        files |= {f"{folder}/class": "0x030200", f"{folder}/vendor": "0x10de", f"{folder}/numa_node": str(node)}
    bridge = "sys/bus/pci/devices/0000:00:00.0"
    return host(root, files | {f"{bridge}/class": "0x060000", f"{bridge}/vendor": "0x10de"})


@pytest.mark.parametrize(
    ("num_nodes", "gpus", "nics", "status"),
    [
        (1, {"0000:41:00.0": 0}, {}, "ok"),
        (2, {"0000:41:00.0": 0}, {}, "skip"),
        (2, {"0000:41:00.0": 0}, {"mlx5_0": 0}, "ok"),
        (2, {"0000:41:00.0": 0, "0000:c1:00.0": 1}, {"mlx5_0": 0}, "warn"),
        (2, {"0000:41:00.0": 0, "0000:c1:00.0": 1}, {"mlx5_0": 0, "mlx5_1": 1}, "ok"),
        (2, {"0000:41:00.0": -1}, {"mlx5_0": 0}, "ok"),  # a GPU that does not say
        (2, {}, {"mlx5_0": 1}, "ok"),
        (2, {}, {"rxe0": -1}, "ok"),
    ],
)
def test_numa(tmp_path: Path, num_nodes: int, gpus: dict[str, int], nics: dict[str, int], status: str) -> None:
    found = hardware.check_numa(numa_tree(tmp_path, num_nodes, gpus), nics)
    assert found.status == status
    if status == "warn":
        assert "0000:c1:00.0" in found.found
        assert "0000:41:00.0," not in found.found.partition("(")[0]


def test_without_a_gpu_the_cores_next_to_the_nic_are_named(tmp_path: Path) -> None:
    assert "cores 8-15" in hardware.check_numa(numa_tree(tmp_path, 2, {}), {"mlx5_0": 1}).found


def test_shared_memory_is_tried() -> None:
    before = set(os.listdir("/proc/self/fd"))
    assert hardware.check_shared_memory().status == "ok"
    assert set(os.listdir("/proc/self/fd")) == before

    def forbidden(name: str, flags: int) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    found = hardware.check_shared_memory(forbidden)
    assert (found.status, "Operation not permitted" in found.found) == ("fail", True)
