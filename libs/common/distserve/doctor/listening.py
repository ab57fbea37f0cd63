"""Checks of the ports that services listen on: free, or held by a service of ours."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

from distserve.config import Config
from distserve.doctor.finding import Finding, Status, bad, ok, skip
from distserve.doctor.host import Host
from distserve.errors import ConfigError
from distserve.worker.reachable import reachable_host

ROCE_PORT = 4791  # UDP destination port of RoCE v2 (IANA: roce)
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp (include/net/tcp_states.h)


def check_tcp_port(host: Host, key: str, address: str, port: int, address_key: str) -> Finding:
    """key, address_key: the settings that name the port and the address."""
    check = f"ports.{key.partition('.')[0]}"
    if not port:
        return ok(check, f"{key} is 0: any free one")
    subject = f"{address or '*'}:{port}"
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(where)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            return _held(check, "tcp", key, port, subject, list(owners(host, "tcp", port)))
        if e.errno == errno.EACCES:
            mend = f"# {key} must be 1024 or more, or give this user CAP_NET_BIND_SERVICE"
            return bad(check, "fail", f"this user may not listen on port {port}", mend, subject)
        mend = f"# {address_key} must be an address of this host, or 0.0.0.0 for all"
        return bad(check, "fail", f"can't listen here: {e.strerror or e}", mend, subject)
    return ok(check, f"port {port} is free", subject)


def check_roce_port(host: Host) -> Finding:
    """Soft-RoCE (rdma_rxe) listens on UDP 4791 itself, in the kernel; a card takes its packets before UDP."""
    found = list(owners(host, "udp", ROCE_PORT))
    if not found:
        return ok("ports.roce", f"UDP port {ROCE_PORT} is free", f"udp:{ROCE_PORT}")
    if all(pid is None for pid, _ in found):
        return ok("ports.roce", f"UDP port {ROCE_PORT} is held by the kernel (rdma_rxe)", f"udp:{ROCE_PORT}")
    return _held("ports.roce", "udp", "Soft-RoCE", ROCE_PORT, f"udp:{ROCE_PORT}", found)


def _held(check: str, kind: str, key: str, port: int, subject: str, found: list[tuple[int | None, str]]) -> Finding:
    known = [(pid, name) for pid, name in found if pid is not None]
    if not known:
        words = f"port {port} is held by a process of another user"
        return bad(check, "warn", words, f"ss -lp{kind[0]}n 'sport = :{port}'  # as root: who holds it", subject)
    pid, name = known[0]
    if _is_ours(name):
        return ok(check, f"port {port} is held by DistServe (pid {pid})", subject, pid=pid)
    # A gateway need not run on this host; a fixed port of the data plane was asked for.
    status: Status = "fail" if key == "transport.port" else "warn"
    mend = f"kill {pid}  # or another {key}" if kind == "tcp" else f"kill {pid}  # Soft-RoCE needs the port"
    return bad(check, status, f"port {port} is held by {name} (pid {pid})", mend, subject)


def owners(host: Host, kind: str, port: int) -> Iterator[tuple[int | None, str]]:
    """(pid, command line) of each socket bound to the port, by /proc/net (proc(5)); pid None if no process that this
    user can see has it."""
    inodes = set()
    for table in (kind, f"{kind}6"):
        for line in host.text(f"/proc/net/{table}").splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and (kind == "udp" or fields[3] == _LISTEN):
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return
    held = False
    for pid in host.names("/proc"):
        if pid.isdigit() and inodes & _links(host, pid):
            held = True
            command = host.text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
            yield int(pid), command or host.text(f"/proc/{pid}/comm")
    if not held:
        yield None, ""


def _is_ours(command: str) -> bool:
    """`python .../bin/distserve decode`, `python -m distserve.cli decode`: not what merely lies in a folder of ours."""
    return any(
        part.rpartition("/")[2] == "distserve" or part.startswith(("distserve.", "distserve_"))
        for part in command.split()[:3]
    )


def _links(host: Host, pid: str) -> set[str]:
    found = set()
    for fd in host.names(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(host.root / f"proc/{pid}/fd/{fd}"))
        except OSError:
            pass  # closed meanwhile
    return found


def check_listening(host: Host, config: Config, rdma: bool) -> list[Finding]:
    """Where services of this configuration would listen."""
    door = config.telemetry.metrics_host
    return [
        check_tcp_port(host, "gateway.port", config.gateway.host, config.gateway.port, "gateway.host"),
        _check_data_plane(host, config),
        check_tcp_port(host, "prefill.metrics_port", door, config.prefill.metrics_port, "telemetry.metrics_host"),
        check_tcp_port(host, "decode.metrics_port", door, config.decode.metrics_port, "telemetry.metrics_host"),
        check_roce_port(host) if rdma else skip("ports.roce", "RDMA is not in use", f"udp:{ROCE_PORT}"),
    ]


def _check_data_plane(host: Host, config: Config) -> Finding:
    """On the address that a decode worker would listen on."""
    port, address = config.transport.port, ""
    if port:
        try:
            address = reachable_host(config)
        except ConfigError as e:
            mend = "# set transport.host to an address of this host that the others reach"
            return bad("ports.transport", "fail", e.message, mend, f"*:{port}")
    return check_tcp_port(host, "transport.port", address, port, "transport.host")
