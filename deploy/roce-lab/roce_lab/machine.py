"""One guest as a QEMU process, and the channel to the agent in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roce_lab import packages
from roce_lab.agent import PORT_NAME
from roce_lab.errors import LabError
from roce_lab.kernel import Kernel

MTU = 4200  # holds RoCE's largest path MTU, 4,096 bytes, and its headers
INSIDE = "10.0.2.15"  # the first guest's address on the card that reaches this machine (QEMU's user network)


@dataclass(frozen=True, slots=True)
class Hardware:
    """memory: as QEMU takes it ("2G"). accelerator: "kvm", "tcg" (plain emulation) or "auto"."""

    memory: str = "2G"
    cpus: int = 1
    accelerator: str = "auto"


def pick_accelerator(wanted: str) -> str:
    """KVM where the processor shows its virtualisation and /dev/kvm opens. (Some clouds have a /dev/kvm that boots
    their own kernels only; there the processor shows none.)"""
    if wanted != "auto":
        return wanted
    flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
    if not {"vmx", "svm"} & set(flags):
        return "tcg"
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return "tcg"
    return "kvm"


class Machine:
    """A guest that is booting or running. `tell` is called on a thread of its own with each event of the agent, and
    with {"event": "gone"} when the guest is."""

    def __init__(
        self,
        node: int,
        *,
        kernel: Kernel,
        hardware: Hardware,
        shared: Path,
        project: Path,
        wire: socket.socket,
        forwards: dict[int, int],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        """wire: this end of the link to the other guest. forwards: {port in the guest: port on 127.0.0.1 here}."""
        self.node = node
        self.console = shared / f"host{node}.console"
        self._tell = tell
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        command = _qemu(node, kernel, hardware, shared, project, self.console, theirs.fileno(), wire.fileno(), forwards)
        # Killed by the kernel with the thread that starts it. Should that fail, the agent sees the channel hang up.
        launcher = [packages.find("setpriv"), "--pdeathsig", "KILL", "--"]
        with theirs, (shared / f"host{node}.qemu").open("wb") as errors:
            self.process = subprocess.Popen(
                [*launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(theirs.fileno(), wire.fileno()),
                start_new_session=True,  # Ctrl-C is for the lab
            )
        self._reader = threading.Thread(target=self._read, name=f"lab-host{node}", daemon=True)
        self._reader.start()

    def send(self, **order: Any) -> None:
        """Raises LabError if the guest is gone."""
        with self._lock:
            try:
                self._channel.sendall(json.dumps(order).encode() + b"\n")
            except OSError as e:
                raise LabError(f"host {self.node} is gone ({e}):\n{self.last_words()}") from e

    def last_words(self) -> str:
        """The end of the console and of what QEMU says."""
        texts = [self.console, self.console.with_suffix(".qemu")]
        return "\n".join(p.read_text(errors="replace")[-1500:].strip() for p in texts if p.exists())

    def kill(self) -> None:
        """Nothing in the guest is worth a shutdown. Idempotent."""
        self.process.kill()
        self.process.wait(10)
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._reader.join(5)
        self._channel.close()

    def _read(self) -> None:
        buffer = b""
        with contextlib.suppress(OSError):
            while data := self._channel.recv(1 << 16):
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._tell(json.loads(line))
        self._tell({"event": "gone"})


def _qemu(
    node: int,
    kernel: Kernel,
    hardware: Hardware,
    shared: Path,
    project: Path,
    console: Path,
    channel_fd: int,
    wire_fd: int,
    forwards: dict[int, int],
) -> list[str]:
    kvm = pick_accelerator(hardware.accelerator) == "kvm"
    command = [packages.find("qemu-system-x86_64"), "-nodefaults", "-no-user-config", "-no-reboot"]
    command += ["-display", "none", "-accel", "kvm" if kvm else "tcg,thread=multi", "-cpu", "host" if kvm else "max"]
    command += ["-m", hardware.memory, "-smp", str(hardware.cpus), "-serial", f"file:{_escape(console)}"]
    command += ["-kernel", str(kernel.vmlinuz), "-initrd", str(kernel.initramfs)]
    command += ["-append", f"console=ttyS0 quiet panic=-1 mitigations=off node={node}"]
    command += ["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]
    command += ["-chardev", f"socket,id=channel,fd={channel_fd}"]
    command += ["-device", f"virtserialport,chardev=channel,name={PORT_NAME}"]
    for tag, path, more in (
        ("host", Path("/"), ",readonly=on"),
        ("project", project, ",readonly=on"),
        ("lab", shared, ""),
    ):
        where = f"local,path={_escape(path)},mount_tag={tag},security_model=none,multidevs=remap{more}"
        command += ["-virtfs", where]
    command += ["-netdev", f"socket,id=wire,fd={wire_fd}"]
    command += ["-device", f"virtio-net-pci,netdev=wire,mac={mac(node, 0)},host_mtu={MTU},romfile="]
    if forwards:
        rules = "".join(f",hostfwd=tcp:127.0.0.1:{here}-{INSIDE}:{there}" for there, here in forwards.items())
        command += ["-netdev", f"user,id=inside,restrict=on{rules}"]
        command += ["-device", f"virtio-net-pci,netdev=inside,mac={mac(node, 1)},romfile="]
    return command


def mac(node: int, card: int) -> str:
    return f"52:54:00:00:0{card}:0{node}"


def _escape(path: Path) -> str:
    """QEMU splits options at commas; a comma of one's own is doubled."""
    return str(path).replace(",", ",,")


def write_settings(shared: Path, project: Path) -> None:
    """What boot.sh reads."""
    folder = shared / ".guest"
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("agent.py"), folder / "agent.py")
    settings = {"PROJECT": project, "PYTHON": sys.executable, "AGENT": "/tmp/lab/.guest/agent.py"}
    lines = [f"{key}={_quote(str(value))}\n" for key, value in settings.items()]
    (folder / "settings").write_text("".join(lines))


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
