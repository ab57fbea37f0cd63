"""Packets that transports have sent, and those that they had to send again.

tcp: segments of its connections, as the kernel counts them (struct tcp_info, include/uapi/linux/tcp.h). rdma: what its
devices count, whoever uses those, from when the first sender or receiver here opened them. Over shm nothing is lost.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_TCP_INFO_BYTES = 256  # asked for; an older kernel gives fewer
_TOTAL_RETRANS = 100  # tcpi_total_retrans: segments sent again
_SEGS_OUT = 136  # tcpi_segs_out, since Linux 4.2: all that were sent, those included

_COUNTED_TO = 0xFFFFFFFF  # both are 32 bits wide, and begin anew: some hours of a fast link

_SENT = ("hw_counters/sent_pkts", "hw_counters/tx_pkts", "counters/port_xmit_packets")

# By driver: the first of these of which the device has any. Each adds up to the times that something was sent again;
# only efa counts packets, the others how often a queue pair went back, with however many packets followed.
_SENT_AGAIN = (
    ("retrans_pkts",),  # efa
    ("completer_retry_err",),  # rxe
    ("packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err"),  # mlx5, of the side that sends
    ("seq_err_naks_rcvd", "to_retransmits"),  # bnxt_re
    ("rcvd_seq_err",),  # an rxe that has no more
)

SYS = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Packets:
    """None: nobody knows."""

    num_sent: int | None = None
    num_sent_again: int | None = None

    def __add__(self, other: Packets) -> Packets:
        return Packets(_sum(self.num_sent, other.num_sent), _sum(self.num_sent_again, other.num_sent_again))

    def since(self, before: Packets) -> Packets:
        """What was added, where both are known. Counters that were set back begin anew."""
        return Packets(_added(self.num_sent, before.num_sent), _added(self.num_sent_again, before.num_sent_again))


def _sum(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else a + b


def _added(now: int | None, before: int | None) -> int | None:
    if now is None or before is None or now < before:
        return now
    return now - before


def _turned(now: int | None, before: int | None) -> int | None:
    """What was added to a counter of 32 bits, which may have begun anew once."""
    return None if now is None else (now - (before or 0)) & _COUNTED_TO


def of_tcp_info(info: bytes) -> Packets:
    """What a kernel tells of one connection, as much of it as this kernel has."""
    sent = struct.unpack_from("=I", info, _SEGS_OUT)[0] if len(info) >= _SEGS_OUT + 4 else None
    again = struct.unpack_from("=I", info, _TOTAL_RETRANS)[0] if len(info) >= _TOTAL_RETRANS + 4 else None
    return Packets(sent, again)


def of_port(port: Path) -> Packets:
    """What a port's folder in sysfs says: .../infiniband/DEVICE/ports/NUMBER."""
    sent = next((num for name in _SENT if (num := _counter(port / name)) is not None), None)
    for names in _SENT_AGAIN:
        found = [num for name in names if (num := _counter(port / "hw_counters" / name)) is not None]
        if found:
            return Packets(sent, sum(found))
    return Packets(sent)


def _counter(path: Path) -> int | None:
    """None if there is none, or it holds no number ("N/A (no PMA)")."""
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None


class PacketCounts:
    """Of a process's data plane. Thread-safe."""

    def __init__(self, sys_root: Path = SYS) -> None:
        self._sys_root = sys_root
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, Packets] = {}  # -> as the kernel had counted when it was last asked
        self._tcp = Packets()  # of all connections until then
        self._ports_lock = threading.Lock()  # of its own: a device may take milliseconds to tell
        self._ports: dict[str, Packets] = {}  # "mlx5_0:1" -> as it was when it was opened

    def opened(self, connection: socket.socket) -> None:
        """Count a TCP connection's, until closing() it."""
        with self._lock:
            self._connections.setdefault(connection, Packets())

    def closing(self, connection: socket.socket) -> None:
        """Its owner closes it next: what it came to stays counted. Without effect for one that isn't counted."""
        with self._lock:
            if connection in self._connections:
                self._ask(connection)
                del self._connections[connection]

    def use_ports(self, names: Iterable[str]) -> None:
        """Count what these ports of RDMA devices do from now on; those that are counted go on."""
        with self._ports_lock:
            for name in names:
                if name not in self._ports:
                    self._ports[name] = of_port(self._folder(name))

    def snapshot(self) -> Mapping[str, Packets]:
        """By transport; those of which nothing is known are left out. Asks the kernel, and devices, which may take
        milliseconds: not for an event loop. At least once while a connection sends 2**32 packets."""
        with self._lock:
            for connection in self._connections:
                self._ask(connection)
            tcp = self._tcp
        with self._ports_lock:
            rdma = Packets()
            for name, before in self._ports.items():
                rdma += of_port(self._folder(name)).since(before)
        return {kind: packets for kind, packets in (("tcp", tcp), ("rdma", rdma)) if packets != Packets()}

    def _ask(self, connection: socket.socket) -> None:
        now, before = _asked(connection), self._connections[connection]
        self._tcp += Packets(_turned(now.num_sent, before.num_sent), _turned(now.num_sent_again, before.num_sent_again))
        if now != Packets():
            self._connections[connection] = now

    def _folder(self, name: str) -> Path:
        device, _, number = name.partition(":")
        return self._sys_root / device / "ports" / (number or "1")


def _asked(connection: socket.socket) -> Packets:
    try:
        return of_tcp_info(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES))
    except OSError:  # closed meanwhile, or no such option here
        return Packets()
