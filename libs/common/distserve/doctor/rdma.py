"""Checks of RDMA on this host: devices, access to them, GIDs, MTU, memory that may be pinned."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence

from distserve.doctor.finding import Finding, Measure, bad, ok, skip
from distserve.doctor.host import Host
from distserve.doctor.wanted import Wanted
from distserve.errors import ConfigError, TransportUnavailable
from distserve.sizing import in_words
from distserve.transport.rdma.ports import HEADER_BYTES, MTUS, Port, choose_gid, choose_ports, numa_distances, numa_of

_CAP_IPC_LOCK = 14  # linux/capability.h; with it RLIMIT_MEMLOCK does not count
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_WORDS = ("docker", "kubepods", "containerd", "libpod", "lxc")


def in_container(host: Host) -> bool:
    groups = host.text("/proc/self/cgroup")
    return any(host.has(f) for f in _CONTAINER_FILES) or any(word in groups for word in _CONTAINER_WORDS)


def default_netdev(host: Host) -> str:
    """The interface of the default route, for commands that are shown; "eth0" if there is none."""
    for line in host.text("/proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 1 and fields[1] == "00000000":
            return fields[0]
    return "eth0"


def check_devices(host: Host, ports: Sequence[Port], wanted: Wanted) -> list[Finding]:
    """Every port there is, and what keeps it from being used."""
    if not ports:
        if not wanted.rdma:
            return [skip("rdma.devices", f"none, and transport.kind is {wanted.kind}")]
        return [
            bad(
                "rdma.devices",
                wanted.severity,
                "this host has no RDMA device"
                + (": KV goes by shm and tcp" if wanted.kind == "auto" else ", and transport.kind is rdma"),
                f"modprobe rdma_rxe && rdma link add rxe0 type rxe netdev {default_netdev(host)}  # in software\n"
                "# a card: load its driver (mlx5_ib, bnxt_re, irdma, ...)",
            )
        ]
    found = []
    for port in ports:
        figures: dict[str, Measure] = {"state": port.state, "link_layer": port.link_layer, "netdev": port.netdev}
        words = f"{port.state or 'state unknown'}, {port.link_layer or 'link layer unknown'}" + (
            f", on {port.netdev}" if port.netdev else ""
        )
        if port.link_layer != "Ethernet":
            found.append(skip("rdma.devices", f"{words}: not RoCE", port.name))
        elif port.is_active:
            found.append(ok("rdma.devices", words, port.name, **figures))
        else:
            mend = f"ip link set {port.netdev or 'NETDEV'} up  # and look at the cable and the switch's port"
            found.append(bad("rdma.devices", "warn", words, mend, port.name, **figures))
    return found


def choose(host: Host, ports: Sequence[Port], wanted: Wanted) -> tuple[list[Port], Finding]:
    """The ports that workers would use, and what there is to say of the choice."""
    if not ports:
        return [], skip("rdma.chosen", "no RDMA device")
    try:
        by_role = {role: _nearest(host, ports, wanted, cpus) for role, cpus in (wanted.cpus or {"": ()}).items()}
    except (ConfigError, TransportUnavailable) as e:
        mend = "ip -4 address add ADDRESS/PREFIX dev NETDEV && ip link set NETDEV up  # a RoCE v2 GID comes with it"
        if isinstance(e, ConfigError):
            mend = "# transport.rdma.devices and transport.rdma.subnet must name what this host has"
        return [], bad("rdma.chosen", wanted.severity, e.message, mend)
    names = {role: ", ".join(p.name for p in chosen) for role, chosen in by_role.items()}
    how = "transport.rdma.devices" if wanted.devices else "nearest of the usable ones"
    if len(set(names.values())) == 1:
        words = next(iter(names.values()))
    else:
        words = ", ".join(f"{role}: {name}" for role, name in names.items())
        how = f"nearest to {' and '.join(f'{role}.cpus' for role in names)}"
    every = [port for chosen in by_role.values() for port in chosen]
    return [p for i, p in enumerate(every) if p not in every[:i]], ok("rdma.chosen", f"{words} ({how})")


def _nearest(host: Host, ports: Sequence[Port], wanted: Wanted, cpus: Sequence[int]) -> list[Port]:
    """As a worker on these cores chooses, or one on this process's. Raises ConfigError, TransportUnavailable."""
    sys_root = host.root / "sys"
    near = numa_of(cpus or None, sys_root)
    distances = None if near is None else numa_distances(near, sys_root)
    return choose_ports(ports, wanted.devices, wanted.subnet, near, distances)


def check_access(host: Host, ports: Sequence[Port], wanted: Wanted, writable: Callable[[str], bool]) -> Finding:
    """The character devices that user space opens (Documentation/infiniband/user_verbs.rst)."""
    nodes = [n for n in host.names("/dev/infiniband") if n.startswith("uverbs")]
    if not nodes:
        if in_container(host):
            mend = "docker run --device /dev/infiniband --network host --ulimit memlock=-1 ..."
            why = "the devices are not mapped into this container: no /dev/infiniband/uverbs*"
        else:
            mend, why = "modprobe ib_uverbs", "no /dev/infiniband/uverbs*: the module ib_uverbs is not loaded"
        return bad("rdma.access", wanted.severity, why, mend)
    closed = [n for n in nodes if not writable(str(host.root / "dev/infiniband" / n))]
    if closed:
        return bad(
            "rdma.access",
            wanted.severity,
            f"this user may not open /dev/infiniband/{closed[0]}",
            "chmod 666 /dev/infiniband/uverbs*  # or add this user to the group that owns them",
        )
    return ok("rdma.access", f"{', '.join(nodes)}", num_nodes=len(nodes))


def check_pyverbs(problem: str, wanted: Wanted) -> Finding:
    """problem: why pyverbs cannot be used; empty if it can."""
    if not problem:
        return ok("rdma.pyverbs", "imports, and opens a device")
    mend = "# see the row on access" if "opened" in problem else "apt-get install python3-pyverbs"
    return bad("rdma.pyverbs", wanted.severity, problem, mend)


def check_gid(port: Port, wanted: Wanted) -> Finding:
    """The GID that would be spoken from."""
    table = ", ".join(f"{g.index}: {g.address} {'v2' if g.is_v2 else 'v1'}" for g in port.gids)
    try:
        gid = choose_gid(port, wanted.subnet)
    except (ConfigError, TransportUnavailable) as e:
        mend = f"ip address add ADDRESS/PREFIX dev {port.netdev or 'NETDEV'}  # a RoCE v2 GID comes with it"
        return bad("rdma.gid", wanted.severity, e.message, mend, port.name)
    figures: dict[str, Measure] = {"index": gid.index, "gid": gid.gid, "num_gids": len(port.gids)}
    if not gid.netdev:
        return bad(
            "rdma.gid",
            "warn",
            f"{gid.address} (index {gid.index}) belongs to an interface of another network namespace",
            "docker run --network host ...  # or rdma dev set DEVICE netns NAME",
            port.name,
            **figures,
        )
    if gid.address.version == 6 and gid.address.is_link_local:
        return bad(
            "rdma.gid",
            "warn",
            f"only link-local {gid.address} (index {gid.index}): it reaches no further than this network",
            f"ip -4 address add ADDRESS/PREFIX dev {gid.netdev}",
            port.name,
            **figures,
        )
    return ok("rdma.gid", f"{gid.address}, index {gid.index}, RoCE v2 (of {table})", port.name, **figures)


def check_mtu(host: Host, port: Port, wanted: Wanted) -> Finding:
    """The interface must be large enough for RDMA's largest packet and its headers."""
    largest = MTUS[0]
    needed = largest + HEADER_BYTES
    netdev_mtu = host.number(f"/sys/class/net/{port.netdev}/mtu") if port.netdev else None
    if netdev_mtu is None or not port.mtu_bytes:
        return skip("rdma.mtu", f"the MTU of {port.netdev or 'its interface'} can't be read", port.name)
    figures: dict[str, Measure] = {"rdma_mtu_bytes": port.mtu_bytes, "netdev_mtu_bytes": netdev_mtu}
    words = f"{port.mtu_bytes} bytes, of {port.netdev}'s {netdev_mtu}"
    if port.mtu_bytes < largest:
        return bad(
            "rdma.mtu",
            "warn",
            f"{words}; {largest} would take {needed}",
            f"ip link set {port.netdev} mtu {4200 if needed <= 4200 else needed}  # on every host, 9216 on switches",
            port.name,
            **figures,
        )
    return ok("rdma.mtu", words, port.name, **figures)


def check_memlock(host: Host, wanted: Wanted, limit_bytes: int | None = None) -> Finding:
    """RDMA pins the whole KV pool. limit_bytes: RLIMIT_MEMLOCK (setrlimit(2)); -1: none; None: ask."""
    if limit_bytes is None:
        limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    need = wanted.pool_bytes
    figures: dict[str, Measure] = {"limit_bytes": limit_bytes, "pool_bytes": need}
    if limit_bytes == resource.RLIM_INFINITY:
        return ok("rdma.memlock", "unlimited", **figures)
    limit = in_words(limit_bytes)
    if _may_lock(host):
        return ok("rdma.memlock", f"{limit}, but CAP_IPC_LOCK goes over it", **figures)
    if need is not None and need <= limit_bytes:
        return ok("rdma.memlock", f"{limit}, the KV pool takes about {in_words(need)}", **figures)
    mend = (
        "ulimit -l unlimited  # needs root, or '* - memlock unlimited' in /etc/security/limits.conf\n"
        "# systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1"
    )
    pool = "whatever the model makes of kv.num_blocks" if need is None else f"about {in_words(need)}"
    return bad("rdma.memlock", wanted.severity, f"{limit} may be pinned, the KV pool takes {pool}", mend, **figures)


def _may_lock(host: Host) -> bool:
    for line in host.text("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
