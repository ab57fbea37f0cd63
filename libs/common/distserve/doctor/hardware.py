"""Checks of the machine itself: kernel, cores' frequency, PCIe's power saving, NUMA, shared memory.

Sources: the kernel's Documentation/admin-guide/pm/cpufreq.rst (scaling_governor), Documentation/ABI/testing/
sysfs-bus-pci (class, numa_node, link/l1_aspm), and the parameter `policy` of drivers/pci/pcie/aspm.c.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence

from distserve.doctor.finding import Finding, bad, ok, skip
from distserve.doctor.host import Host

MODULES = ("ib_core", "ib_uverbs")  # what any RDMA device needs; its driver comes on top
_GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x1200")  # VGA, 3D controller, processing accelerator


def check_kernel(host: Host) -> Finding:
    """Linux' version, and whether the modules of RDMA are there (loaded, or built in: then sysfs has their class)."""
    version = host.text("/proc/sys/kernel/osrelease")
    if not version:
        return bad("host.kernel", "fail", "this is not Linux: /proc/sys/kernel/osrelease can't be read", "")
    loaded = {line.split()[0] for line in host.text("/proc/modules").splitlines() if line}
    drivers = sorted(m for m in loaded if m.endswith(("_ib", "_re")) or m in ("rdma_rxe", "siw", "irdma"))
    rdma = [m for m in MODULES if m in loaded or host.has(f"/sys/module/{m}")] + drivers
    return ok("host.kernel", f"{version}; RDMA modules: {', '.join(rdma) or 'none'}", version=version)


def check_governor(host: Host) -> Finding:
    """Cores that clock down between bursts add to every wake-up."""
    cpus = [name for name in host.names("/sys/devices/system/cpu") if re.fullmatch(r"cpu\d+", name)]
    governors = Counter(
        text for c in cpus if (text := host.text(f"/sys/devices/system/cpu/{c}/cpufreq/scaling_governor"))
    )
    if not governors:
        return skip("host.governor", "no cpufreq here: a virtual machine, or the firmware decides")
    slow = {name: count for name, count in governors.items() if name != "performance"}
    if not slow:
        return ok("host.governor", f"performance on all {governors['performance']} cores")
    found = ", ".join(f"{name} on {count}" for name, count in sorted(slow.items()))
    return bad(
        "host.governor",
        "warn",
        f"{found} of {governors.total()} cores: they clock down between bursts",
        "cpupower frequency-set -g performance",
        num_slow_cores=sum(slow.values()),
    )


def check_aspm(host: Host, devices: Sequence[str] = ()) -> Finding:
    """PCIe links that sleep wake up in microseconds. devices: PCI folders below /sys of NICs and GPUs."""
    text = host.text("/sys/module/pcie_aspm/parameters/policy")
    chosen = re.search(r"\[(\w+)\]", text)
    if not chosen:
        return skip("host.aspm", "the kernel has no PCIe ASPM")
    policy = chosen[1]
    asleep = [
        folder.rsplit("/", 1)[-1]
        for folder in devices
        if any(
            host.text(f"{folder}/link/{name}") == "1"
            for name in host.names(f"{folder}/link")
            if re.fullmatch(r"(l0s|l1|l1_1|l1_2)_aspm", name)
        )
    ]
    mend = (
        "echo performance > /sys/module/pcie_aspm/parameters/policy\n"
        "# and after a restart: pcie_aspm.policy=performance on the kernel's command line"
    )
    if asleep:
        return bad("host.aspm", "warn", f"policy {policy}; links that may sleep: {', '.join(asleep)}", mend)
    if policy in ("powersave", "powersupersave"):
        return bad("host.aspm", "warn", f"policy {policy}: PCIe links may sleep between transfers", mend)
    return ok("host.aspm", f"policy {policy}" + ("; no NIC's or GPU's link may sleep" if devices else ""))


def gpus(host: Host) -> dict[str, int]:
    """PCI address -> NUMA node (-1: none) of each GPU."""
    found = {}
    for address in host.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{address}"
        of_gpu = host.text(f"{folder}/class").startswith(_GPU_CLASSES)
        if of_gpu and host.text(f"{folder}/vendor") in _GPU_VENDORS:
            node = host.number(f"{folder}/numa_node")
            found[address] = -1 if node is None else node
    return found


def check_numa(host: Host, nics: dict[str, int]) -> Finding:
    """Whether each GPU has an RDMA device on its own node. nics: device -> node (-1: unknown)."""
    nodes = [int(n[4:]) for n in host.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", n)]
    cards = gpus(host)
    if len(nodes) <= 1:
        return ok("host.numa", "one node: everything is near", num_nodes=max(1, len(nodes)))
    where = ", ".join(f"{name} on {node}" for name, node in sorted({**nics, **cards}.items()) if node >= 0)
    if not nics:
        return skip(
            "host.numa", f"{len(nodes)} nodes; no RDMA device to compare with" + (f" ({where})" if where else "")
        )
    far = sorted(card for card, node in cards.items() if node >= 0 and node not in nics.values())
    if far:
        return bad(
            "host.numa",
            "warn",
            f"no RDMA device on the node of GPU {', '.join(far)} ({where}): its KV crosses the sockets' link",
            "# put a NIC into a slot of that node, or run the worker on a GPU near one: CUDA_VISIBLE_DEVICES",
            num_nodes=len(nodes),
        )
    if not cards and len({n for n in nics.values() if n >= 0}) == 1:
        node = next(n for n in nics.values() if n >= 0)
        cpus = host.text(f"/sys/devices/system/node/node{node}/cpulist")
        return ok(
            "host.numa",
            f"{where}; workers are nearest on cores {cpus} (prefill.cpus, decode.cpus)",
            num_nodes=len(nodes),
        )
    return ok("host.numa", where or f"{len(nodes)} nodes", num_nodes=len(nodes))


def check_shared_memory(make: Callable[[str, int], int] = os.memfd_create) -> Finding:
    """KV pools are sealed memfds, in ordinary pages: /dev/shm and huge pages are not needed."""
    try:
        fd = make("distserve-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        finally:
            os.close(fd)
    except OSError as e:
        return bad(
            "host.shm",
            "fail",
            f"no sealed memfd can be made ({e.strerror or e}): KV pools need one",
            "# allow memfd_create and fcntl(F_ADD_SEALS) in the sandbox's seccomp profile",
        )
    return ok("host.shm", "memfd with seals; neither /dev/shm nor huge pages are needed")
