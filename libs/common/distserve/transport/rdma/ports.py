"""The RDMA ports of this host, as sysfs shows them, and which of them a worker uses. Needs neither pyverbs nor a
device that works: `distserve doctor` and the tests read a tree of files.

Sysfs: Documentation/ABI/stable/sysfs-class-infiniband of the Linux kernel; GIDs and their types: its
Documentation/ABI/testing/sysfs-class-infiniband. RoCE v2: InfiniBand specification, annex A17.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distserve.errors import ConfigError, TransportUnavailable
from distserve.messages import RailOffer
from distserve.transport.rdma.addresses import Address, prefix_lengths
from distserve.transport.rdma.rails import Rail as Rail  # which of our ports talks to which of theirs
from distserve.transport.rdma.rails import address_of, in_one_subnet, preference
from distserve.transport.rdma.rails import match_rails as match_rails

SYS = Path("/sys")
MTUS = (4096, 2048, 1024, 512, 256)

# What the kernel takes off a network interface's MTU before it rounds down to an MTU of RDMA (iboe_get_mtu in its
# include/rdma/ib_addr.h): GRH, which is as long as IPv6's header, 40, UDP 8, BTH 12, XRC 4, AtomicETH 28, ICRC 4.
HEADER_BYTES = 40 + 8 + 12 + 4 + 28 + 4


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table. address: what the GID maps, an IPv4Address if IPv4-mapped. prefix_length: of
    the same address on netdev; 0 if that is not known."""

    index: int
    gid: str  # of the form 0000:0000:0000:0000:0000:ffff:0a4d:0001
    is_v2: bool  # RoCE v2: over UDP, routable
    netdev: str  # "" if it can't be seen from this network namespace
    address: Address
    prefix_length: int = 0


@dataclass(frozen=True, slots=True)
class Port:
    """mtu_bytes: what netdev's MTU allows RDMA, 0 if not known (the device may have a lower limit of its own).
    numa_node: -1 if not known."""

    device: str
    port: int  # from 1
    state: str  # "ACTIVE", "DOWN", "INIT", "ARMED", ...
    link_layer: str  # "Ethernet" or "InfiniBand"
    netdev: str
    mtu_bytes: int
    numa_node: int
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


def discover(sys_root: Path = SYS, prefixes: Mapping[tuple[str, Address], int] | None = None) -> list[Port]:
    """Every port of every RDMA device under sys_root/class/infiniband, by name; none if there is no such folder.
    prefixes: {(interface, address): prefix length}; asked of the kernel if None."""
    root = sys_root / "class/infiniband"
    if not root.is_dir():
        return []
    known = prefix_lengths() if prefixes is None else prefixes
    return [
        _port(sys_root, device, number, known)
        for device in sorted(root.iterdir())
        for number in sorted(int(path.name) for path in device.glob("ports/[0-9]*"))
    ]


def _port(sys_root: Path, device: Path, number: int, prefixes: Mapping[tuple[str, Address], int]) -> Port:
    port = device / f"ports/{number}"
    gids = tuple(_gids(port, prefixes))
    # The parent of a device of software (rdma_rxe) is its interface.
    netdev = next((gid.netdev for gid in gids if gid.netdev), "") or _read(device / "parent")
    mtu = _number(sys_root / "class/net" / netdev / "mtu", 0) if netdev else 0
    numa = _number(device / "device/numa_node", -1)
    if numa < 0 and netdev:
        numa = _number(sys_root / "class/net" / netdev / "device/numa_node", -1)
    return Port(
        device=device.name,
        port=number,
        state=_read(port / "state").rpartition(":")[2].strip(),  # "4: ACTIVE"
        link_layer=_read(port / "link_layer"),
        netdev=netdev,
        mtu_bytes=rdma_mtu(mtu),
        numa_node=numa,
        gids=gids,
    )


def _gids(port: Path, prefixes: Mapping[tuple[str, Address], int]) -> list[Gid]:
    """A table has up to 1024 entries, most of them unused: their type is read first, which fails."""
    found: list[Gid] = []
    gids = port / "gids"
    types, netdevs = f"{port}/gid_attrs/types", f"{port}/gid_attrs/ndevs"
    for index in sorted(int(name) for name in os.listdir(gids) if name.isdigit()) if gids.is_dir() else ():
        kind = _read(f"{types}/{index}")
        text = _read(f"{gids}/{index}") if kind else ""
        if not text or not ipaddress.IPv6Address(text).packed.strip(b"\0"):
            continue
        netdev = _read(f"{netdevs}/{index}")
        address = address_of(text)
        found.append(Gid(index, text, "v2" in kind, netdev, address, prefixes.get((netdev, address), 0)))
    return found


def rdma_mtu(netdev_mtu: int) -> int:
    """The largest MTU of RDMA (bytes of payload in a packet) for an interface's; 0 if not even the smallest fits."""
    return next((mtu for mtu in MTUS if mtu + HEADER_BYTES <= netdev_mtu), 0)


def choose_ports(
    ports: Sequence[Port],
    devices: Sequence[str] = (),
    subnet: str = "",
    near_numa: int | None = None,
    distances: Mapping[int, int] | None = None,
) -> list[Port]:
    """The ports to use, best first.

    devices: the configured ones ("mlx5_0" is its first usable port, or "mlx5_0:1"), in that order, all of them. None
    configured: the one active RoCE v2 port nearest to NUMA node near_numa (None: no preference), the first by name of
    those equally near. Several are used only if configured: that two of them have paths apart, through the machine
    and to the peer, is for a person to know. distances: from near_numa to each node (numa_distances); without them
    the same node, then an unknown one, then any other.

    Raises ConfigError (a configured port is missing, not active, or has no RoCE v2 GID, in `subnet` if one is given;
    names what exists), TransportUnavailable (nothing configured and nothing usable).
    """
    network = _network(subnet)
    if not devices:
        usable = [port for port in ports if not _unusable(port, network)]
        if not usable:
            why = "; ".join(f"{port.name} {_unusable(port, network)}" for port in ports)
            raise TransportUnavailable(f"no usable RoCE v2 port: {why or 'this host has no RDMA device'}")
        return [min(usable, key=lambda port: (_distance(port, near_numa, distances), port.name))]
    chosen: list[Port] = []
    for name in devices:
        device, _, number = name.partition(":")
        candidates = [port for port in ports if port.device == device and number in ("", str(port.port))]
        if not candidates:
            exist = ", ".join(port.name for port in ports)
            raise _bad_device(name, "does not exist", f"one of {exist}" if exist else "an RDMA device on this host")
        port = next((port for port in candidates if not _unusable(port, network)), candidates[0])
        if why := _unusable(port, network):
            raise _bad_device(name, why, "an active RoCE port" + (f" with an address in {subnet}" if subnet else ""))
        if port in chosen:
            raise _bad_device(name, f"names port {port.name} a second time", "each port once")
        chosen.append(port)
    return chosen


def _unusable(port: Port, network: ipaddress.IPv4Network | ipaddress.IPv6Network | None) -> str:
    """Why a port can't be used; "" if it can."""
    if port.link_layer != "Ethernet":
        return f"is of link layer {port.link_layer or 'unknown'}, not Ethernet"
    if not port.is_active:
        return f"is {port.state or 'in an unknown state'}, not ACTIVE"
    v2 = [gid for gid in port.gids if gid.is_v2]
    if not v2:
        return "has no RoCE v2 GID"
    if network is not None and not any(gid.address in network for gid in v2):
        return f"has no RoCE v2 GID in {network}, only {', '.join(str(gid.address) for gid in v2)}"
    return ""


def _distance(port: Port, near: int | None, distances: Mapping[int, int] | None) -> int:
    if near is None or port.numa_node == near:
        return 0
    if port.numa_node < 0:
        return 15  # between a node itself, 10, and its neighbour, 20 or so (ACPI specification, SLIT)
    return (distances or {}).get(port.numa_node, 255)


def choose_gid(port: Port, subnet: str = "", peers: Sequence[str] = ()) -> Gid:
    """The GID to speak from: of type RoCE v2, in `subnet` (CIDR) if one is given; first one in the IP subnet of one of
    the peers' GIDs, then IPv4-mapped, then global IPv6, then link-local; the lowest index of equals.
    Raises ConfigError (none in the subnet), TransportUnavailable (no RoCE v2 GID at all)."""
    network = _network(subnet)
    v2 = [gid for gid in port.gids if gid.is_v2]
    if not v2:
        have = ", ".join(gid.gid for gid in port.gids) or "none"
        raise TransportUnavailable(f"{port.name} has no RoCE v2 GID (of other types: {have})")
    inside = [gid for gid in v2 if network is None or gid.address in network]
    if not inside:
        have = ", ".join(f"{gid.address} (index {gid.index})" for gid in v2)
        raise ConfigError(
            f"no RoCE v2 GID of {port.name} is in {subnet}: it has {have}",
            key="transport.rdma.subnet",
            value=subnet,
            expected=f"a network that holds one of {have}",
        )

    def rank(gid: Gid) -> tuple[bool, int, int]:
        near = any(in_one_subnet((gid.address, gid.prefix_length), (address_of(peer), 0)) for peer in peers)
        return not near, preference(gid.address), gid.index

    return min(inside, key=rank)


def offer(index: int, port: Port, mtu: int, subnet: str = "") -> RailOffer:
    """What a peer is told of the port: every RoCE v2 GID it may be spoken to by, in `subnet` if one is given.
    mtu: bytes. Raises as choose_gid."""
    first = choose_gid(port, subnet)
    network = _network(subnet)
    gids = [gid for gid in port.gids if gid.is_v2 and (network is None or gid.address in network)]
    gids.sort(key=lambda gid: (gid != first, gid.index))
    return RailOffer(index=index, gids=tuple((gid.index, gid.gid, gid.prefix_length) for gid in gids), mtu=mtu)


def traffic_class_override(port: Port, sys_root: Path = SYS) -> int | None:
    """The traffic class (octet, 0..255) that the host forces on every queue pair of the port, whatever the pair asks
    for; None if there is no such thing. Of mlx5, as NVIDIA's driver package has it: the file tc/N/traffic_class of
    the device holds "Global tclass=106" once one is set. What configfs has, rdma_cm/DEVICE/ports/N/default_roce_tos,
    is for connections made through the RDMA connection manager, which ours are not."""
    text = _read(sys_root / "class/infiniband" / port.device / f"tc/{port.port}/traffic_class")
    found = re.search(r"^(?:Global tclass=)?(\d+)\s*$", text, re.MULTILINE)
    return int(found[1]) if found else None


def numa_of(cpus: Collection[int] | None = None, sys_root: Path = SYS) -> int | None:
    """The NUMA node that holds all of the CPUs (this process's, if None); None if they are spread or it isn't known."""
    wanted = set(os.sched_getaffinity(0) if cpus is None else cpus)
    for node in sorted((sys_root / "devices/system/node").glob("node[0-9]*")):
        if wanted and wanted <= _cpu_list(_read(node / "cpulist")):
            return int(node.name.removeprefix("node"))
    return None


def numa_of_pci(address: str, sys_root: Path = SYS) -> int | None:
    """The NUMA node of a PCI device, "0000:1b:00.0"; None if it isn't known."""
    node = _number(sys_root / "bus/pci/devices" / address.lower() / "numa_node", -1)
    return node if node >= 0 else None


def numa_distances(node: int, sys_root: Path = SYS) -> dict[int, int]:
    """{node: distance from `node`}, 10 is itself; empty if not known. The file's columns are the nodes online."""
    nodes = sorted(int(path.name[4:]) for path in (sys_root / "devices/system/node").glob("node[0-9]*"))
    distances = _read(sys_root / f"devices/system/node/node{node}/distance").split()
    return dict(zip(nodes, map(int, distances), strict=False))


def _cpu_list(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}"""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _network(subnet: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(subnet, strict=False) if subnet else None
    except ValueError as error:
        raise ConfigError(
            f"transport.rdma.subnet is {subnet!r}: {error}",
            key="transport.rdma.subnet",
            value=subnet,
            expected="a network such as 10.77.0.0/24",
        ) from None


def _bad_device(name: str, why: str, expected: str) -> ConfigError:
    return ConfigError(
        f"transport.rdma.devices has {name!r}, which {why}; expected {expected}",
        key="transport.rdma.devices",
        value=name,
        expected=expected,
    )


def _read(path: Path | str) -> str:
    """A sysfs file's text, a page at most, "" if it can't be read: it may vanish, or not apply, at any time."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 4096).decode("ascii", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)


def _number(path: Path, otherwise: int) -> int:
    try:
        return int(_read(path))
    except ValueError:
        return otherwise
