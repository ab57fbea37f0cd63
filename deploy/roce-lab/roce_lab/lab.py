"""The two hosts together.

    with Lab() as lab:
        lab.host1.run("rdma link")
        server = lab.host2.start([...])
        with lab.capture("kv") as capture:
            ...
        packets = capture.path

Both guests boot at once and end with this process, however it ends. What they write outside /tmp/lab is forgotten.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from roce_lab import kernel, packages
from roce_lab.errors import LabError, LabTimeout
from roce_lab.host import SHARED, Host, Process
from roce_lab.machine import INSIDE, MTU, Hardware, Machine, mac, write_settings

PROJECT = Path(__file__).resolve().parents[3]
BOOT_TIMEOUT_S = 120.0

# Cards are found by address: their names depend on the order in which the kernel meets them.
_NETWORK = r"""
set -e
hostname host{node}
echo '10.77.0.1 host1
10.77.0.2 host2' >> /etc/hosts
ip link set lo up
for card in /sys/class/net/*; do
  case $(cat $card/address) in
    {wire}) ip link set ${{card##*/}} name wire0 ;;
    {inside}) ip link set ${{card##*/}} name inside0 ;;
  esac
done
ip link set wire0 name eth0
ip address add 10.77.0.{node}/24 dev eth0
ip link set eth0 mtu {mtu} up
if [ -e /sys/class/net/inside0 ]; then
  ip link set inside0 name eth1
  ip address add {address}/24 dev eth1
  ip link set eth1 up
fi
rdma link add rxe0 type rxe netdev eth0
"""


class Lab:
    """`folder` is what the guests see, writable, as /tmp/lab; without one, a temporary folder that goes with the lab.
    `forwards`: ports of host 1 that are to be reached from here, see forwarded()."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        hardware: Hardware | None = None,
        forwards: tuple[int, ...] = (),
        cache: Path | None = None,
        install: bool = False,
    ) -> None:
        self._wanted_folder = folder
        self._hardware = hardware or Hardware()
        self._forwards = forwards
        self._cache = cache or kernel.default_cache()
        self._install = install
        self._stack = ExitStack()
        self._ports: dict[int, int] = {}
        self.folder = Path()
        self.boot_s = 0.0

    def __enter__(self) -> Self:
        packages.require(install=self._install)
        image = kernel.prepare(self._cache)
        with ExitStack() as stack:
            self.folder = self._own_folder(stack)
            self._ports = {port: _free_port() for port in self._forwards}
            write_settings(self.folder, PROJECT)
            begun = time.monotonic()
            self.host1, self.host2 = Host(1, self.folder), Host(2, self.folder)
            ends = socket.socketpair()
            with ends[0], ends[1]:
                for host, wire in zip(self.hosts, ends, strict=True):
                    machine = Machine(
                        host.node,
                        kernel=image,
                        hardware=self._hardware,
                        shared=self.folder,
                        project=PROJECT,
                        wire=wire,
                        forwards=self._ports if host.node == 1 else {},
                        tell=host.hear,
                    )
                    stack.callback(machine.kill)
                    host.attach(machine.send)
                    host.last_words = machine.last_words
            self._connect(begun + BOOT_TIMEOUT_S)
            self.boot_s = time.monotonic() - begun
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    @property
    def hosts(self) -> tuple[Host, Host]:
        return self.host1, self.host2

    def host(self, node: int) -> Host:
        """Raises LabError for a node other than 1 or 2."""
        if node not in (1, 2):
            raise LabError(f"host is {node}, must be 1 or 2")
        return self.hosts[node - 1]

    def forwarded(self, port: int) -> str:
        """`127.0.0.1:port here` that leads to a port of host 1. Raises LabError if it wasn't asked for."""
        if port not in self._ports:
            raise LabError(f"port {port} is not forwarded, only {sorted(self._ports)}: name it when the lab is made")
        return f"127.0.0.1:{self._ports[port]}"

    def capture(self, name: str, *, of: str = "") -> Capture:
        """Every packet on host 1's eth0 while it is entered, or those that match a filter (pcap-filter(7))."""
        return Capture(self, name, of)

    def _own_folder(self, stack: ExitStack) -> Path:
        if self._wanted_folder is None:
            folder = Path(tempfile.mkdtemp(prefix="distserve-roce-lab-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            return folder
        folder = self._wanted_folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context((folder / ".lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError(f"a lab is already up in {folder}") from None
        return folder

    def _connect(self, deadline: float) -> None:
        for host in self.hosts:
            if not host.ready.wait(max(0.0, deadline - time.monotonic())):
                raise LabTimeout(f"host {host.node} has not booted in {BOOT_TIMEOUT_S:g} s:\n{host.last_words()}")
            if host.gone:
                raise LabError(f"host {host.node} ended while it booted:\n{host.last_words()}")
            host.set_clock()
        setups = [
            host.start(
                _NETWORK.format(
                    node=host.node, mtu=MTU, wire=mac(host.node, 0), inside=mac(host.node, 1), address=INSIDE
                ),
                name="set the network up",
            )
            for host in self.hosts
        ]
        for setup in setups:
            if status := setup.wait(max(1.0, deadline - time.monotonic())):
                raise LabError(f"{setup.what} ended with status {status}:\n{setup.tail()}")
        for host in self.hosts:
            host.set_clock()  # once more, now that the agent is prompt


class Capture:
    """tcpdump on host 1, into <folder>/<name>.pcap."""

    def __init__(self, lab: Lab, name: str, of: str) -> None:
        self._lab = lab
        self._name = name
        self._filter = of
        self._process: Process | None = None
        self.path = lab.folder / f"{name}.pcap"

    def start(self) -> None:
        """Returns once it captures."""
        # 64 MiB of buffer (-B is in KiB): an emulated host is slow to write.
        command = ["tcpdump", "-i", "eth0", "-n", "-U", "-B", "65536", "-Z", "root", "-w", str(SHARED / self.path.name)]
        self._process = self._lab.host1.start([*command, *([self._filter] if self._filter else [])], name=self._name)
        self._process.wait_for("listening on", 30)

    def stop(self, timeout_s: float = 60.0) -> Path:
        """Ends it once every packet so far is in the file, which is returned. Raises LabError if packets were
        dropped: then the capture proves nothing."""
        assert self._process is not None
        self._flush(timeout_s)
        self._process.terminate()
        self._process.wait(timeout_s)
        said = self._process.text()
        if "0 packets dropped by kernel" not in said:
            raise LabError(f"the capture {self._name} is not whole:\n{said}")
        return self.path

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.stop()
        elif self._process is not None:
            self._process.kill()

    def _flush(self, timeout_s: float) -> None:
        """Packets are written in order, so everything is there once a last one of our own is (to UDP's discard port,
        RFC 863)."""
        if self._filter:
            return  # it may not match; what a filter lets through is for looking at, not for proofs
        mark = secrets.token_hex(16)
        self._lab.host1.run(f"echo {mark} > /dev/udp/{self._lab.host2.address}/9", timeout_s)
        deadline = time.monotonic() + timeout_s
        while not _ends_with(self.path, mark.encode()):
            if time.monotonic() > deadline:
                raise LabTimeout(f"the capture {self._name} did not catch up within {timeout_s:g} s")
            time.sleep(0.05)


def _ends_with(path: Path, mark: bytes, within: int = 1 << 20) -> bool:
    with path.open("rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - within))
        return mark in f.read()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
