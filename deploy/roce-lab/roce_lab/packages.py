"""What the machine must have. Names of packages are those of Debian 12; Ubuntu has the same."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from roce_lab.errors import LabError

_SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))

COMMANDS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "depmod": "kmod",
    "tcpdump": "tcpdump",
    "ip": "iproute2",
    "rdma": "iproute2",
    "tc": "iproute2",
    "setpriv": "util-linux",
}
FILES = {
    "/usr/lib/python3/dist-packages/pyverbs/__init__.py": "python3-pyverbs",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
    "/etc/rdma": "rdma-core",
}
DOWNLOAD_TIMEOUT_S = 600.0


def find(command: str) -> str:
    """Where a command is, the system's folders included. Raises LabError with the package that has it."""
    found = shutil.which(command, path=_SYSTEM_PATH)
    if found is None:
        package = COMMANDS.get(command, command)
        raise LabError(f"{command} is not installed: apt-get install -y --no-install-recommends {package}")
    return found


def missing() -> list[str]:
    """Packages to install."""
    lacking = {package for command, package in COMMANDS.items() if shutil.which(command, path=_SYSTEM_PATH) is None}
    lacking |= {package for path, package in FILES.items() if not Path(path).exists()}
    if "busybox-static" not in lacking and not _is_static(Path(find("busybox"))):
        lacking.add("busybox-static")  # the other one, of package busybox, finds no libraries in an initramfs
    return sorted(lacking)


def _is_static(program: Path) -> bool:
    """An ELF file that needs no loader: none is named in its first page, where the program headers and what they name
    at once are (elf(5), PT_INTERP)."""
    with program.open("rb") as f:
        return b"/ld-linux" not in f.read(4096)


def update() -> None:
    """apt's lists. Raises LabError."""
    _apt("update")


def require(*, install: bool) -> None:
    """Raises LabError with the line that installs what is missing; with `install`, and as root, runs it first."""
    lacking = missing()
    if not lacking:
        return
    line = f"apt-get install -y --no-install-recommends {' '.join(lacking)}"
    if not install or os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise LabError(f"the lab needs packages that are not installed; as root: {line}")
    print(f"lab: {line}", flush=True)
    update()
    _apt(*line.split()[1:])
    if still := missing():
        raise LabError(f"still missing after {line}: {', '.join(still)}")


def _apt(*arguments: str) -> None:
    command = ["apt-get", "-qq", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, env=environment, timeout=DOWNLOAD_TIMEOUT_S, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LabError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
