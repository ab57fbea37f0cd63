"""All checks of one host, in the order in which they are shown."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack

from distserve.bus.base import Bus
from distserve.config import Config
from distserve.doctor import bounds, hardware, listening, marking, nats_server, rdma
from distserve.doctor.clock import check_clocks
from distserve.doctor.finding import Finding, bad, skip
from distserve.doctor.host import Host
from distserve.doctor.registry import check_registry
from distserve.doctor.wanted import Wanted
from distserve.errors import BusError, DistServeError
from distserve.machine import available_bytes
from distserve.transport.rdma.ports import Port, discover
from distserve.worker.service import connect

log = logging.getLogger(__name__)

Available = Callable[[], str]
Check = Callable[[], Finding | Iterable[Finding]]


def pyverbs_problem() -> str:
    """Why pyverbs can't be used; empty if it can."""
    try:
        from distserve.transport.rdma import verbs
    except ImportError as e:
        return f"{e.name or 'pyverbs'} can't be imported: {e}"
    return verbs.available()


def look_around(
    config: Config,
    host: Host | None = None,
    available: Available = pyverbs_problem,
    writable: Callable[[str], bool] | None = None,
) -> list[Finding]:
    """Everything that needs no network: reads files, runs tools, tries ports. Takes up to seconds: not for an event
    loop. host, available and writable are for tests."""
    host = host or Host()
    wanted = Wanted.of(config, _available_bytes())
    ports = _ports(host)
    chosen, refused = rdma.choose(host, ports, wanted)
    netdevs = list(dict.fromkeys(p.netdev for p in chosen if p.netdev))
    folders = [f"/sys/class/infiniband/{p.device}/device" for p in chosen]
    folders += [f"/sys/bus/pci/devices/{address}" for address in hardware.gpus(host)]

    def can_write(path: str) -> bool:
        return os.access(path, os.R_OK | os.W_OK)

    checks: list[tuple[str, Check]] = [("rdma.devices", lambda: rdma.check_devices(host, ports, wanted))]
    later = ("access", "pyverbs", "chosen", "gid", "mtu", "memlock")
    if not wanted.rdma:
        checks += [(f"rdma.{n}", _left_out(f"rdma.{n}", f"transport.kind is {wanted.kind}")) for n in later]
    elif not ports:
        checks += [(f"rdma.{n}", _left_out(f"rdma.{n}", "no RDMA device")) for n in later]
    else:
        checks += [
            ("rdma.access", lambda: rdma.check_access(host, ports, wanted, writable or can_write)),
            ("rdma.pyverbs", lambda: rdma.check_pyverbs(available(), wanted)),
            ("rdma.chosen", lambda: refused),
            ("rdma.gid", lambda: [rdma.check_gid(p, wanted) for p in chosen]),
            ("rdma.mtu", lambda: [rdma.check_mtu(host, p, wanted) for p in chosen]),
            ("rdma.memlock", lambda: rdma.check_memlock(host, wanted)),
        ]
        if not chosen:
            checks[-3:-1] = [(f"rdma.{n}", _left_out(f"rdma.{n}", "no usable port")) for n in ("gid", "mtu")]
    if chosen and wanted.rdma:
        checks += [
            ("network.marks", lambda: [f for n in netdevs for f in marking.check_marks(host, n, wanted)]),
            ("network.override", lambda: [marking.check_override(host, p, wanted) for p in chosen]),
            ("network.cma_tos", lambda: [marking.check_cma_tos(host, p) for p in chosen]),
        ]
    else:
        why = "no RDMA device to use" if wanted.rdma else f"transport.kind is {wanted.kind}"
        names = ("network.trust", "network.pfc", "network.ecn", "network.override", "network.cma_tos")
        checks += [(name, _left_out(name, why)) for name in names]
    checks += [
        ("host.kernel", lambda: hardware.check_kernel(host)),
        ("host.governor", lambda: hardware.check_governor(host)),
        ("host.aspm", lambda: hardware.check_aspm(host, folders)),
        ("host.numa", lambda: hardware.check_numa(host, {p.name: p.numa_node for p in chosen or ports})),
        ("host.shm", hardware.check_shared_memory),
        ("host.cores", lambda: bounds.check_cores(host, config)),
        ("host.realtime", lambda: bounds.check_realtime(host, config)),
        ("host.mps", lambda: bounds.check_mps(config)),
        (
            "ports",
            lambda: listening.check_listening(host, config, wanted.rdma),
        ),
    ]
    return [finding for name, check in checks for finding in _run(name, check)]


def _ports(host: Host) -> list[Port]:
    try:
        return discover(host.root / "sys")
    except (OSError, ValueError):
        log.debug("the RDMA devices can't be read", exc_info=True)
        return []


def _left_out(check: str, why: str) -> Check:
    return lambda: skip(check, why)


def _run(name: str, check: Check) -> list[Finding]:
    """A check that fails by itself must not cost the others: hosts differ more than anyone foresees."""
    try:
        found = check()
    except Exception as e:
        log.debug("the check %s failed", name, exc_info=True)
        return [skip(name, f"could not be looked at: {type(e).__name__}: {e}")]
    return [found] if isinstance(found, Finding) else list(found)


def _available_bytes() -> int:
    try:
        return available_bytes()
    except OSError:
        return 0


async def look_further(config: Config, peer: str) -> list[Finding]:
    """Everything that goes over the network: the NATS servers, the registry, clocks, and the peer if one is named."""
    findings = await nats_server.check_servers(config.bus.url)
    if not config.bus.url:
        why = "bus.url is empty"
        left_out = [skip("nats.registry", why), skip("clock.offset", why)]
        return findings + left_out + ([_unreachable(peer, f"{why}: both hosts meet on one NATS")] if peer else [])
    if not any(f.check == "nats.server" and f.status == "ok" for f in findings):
        why = "no usable NATS server"
        left_out = [skip("nats.registry", why), skip("clock.offset", why)]
        return findings + left_out + ([_unreachable(peer, why)] if peer else [])
    async with AsyncExitStack() as stack:
        try:
            bus = await stack.enter_async_context(await connect(config.bus, f"doctor-{os.getpid()}"))
        except BusError as e:
            mend = "# bus.url needs a user and password that this server takes: nats://USER:PASSWORD@HOST:4222"
            findings.append(bad("nats.registry", "fail", e.message, mend))
            return findings + ([_unreachable(peer, "no connection to NATS")] if peer else [])
        finding, workers = await check_registry(bus)
        findings.append(finding)
        findings += await check_clocks(bus, workers)
        if peer:
            findings += await _peer(bus, config, peer)
    return findings


async def _peer(bus: Bus, config: Config, peer: str) -> list[Finding]:
    try:
        from distserve.doctor.peer import check_peer
    except ModuleNotFoundError as e:
        return [skip("peer.reach", f"needs {e.name}", peer, mend="pip install 'distserve[engine]'")]
    try:
        return await check_peer(bus, config, peer)
    except DistServeError as e:
        return [_unreachable(peer, e.message)]


def _unreachable(peer: str, why: str) -> Finding:
    return bad("peer.reach", "fail", why, f"distserve doctor --nats-url nats://HOST:4222 --peer {peer}", peer)


async def examine(config: Config, peer: str = "") -> list[Finding]:
    """Both, at once where they don't disturb each other: a peer's figures are taken when this host is quiet."""
    near = await asyncio.to_thread(look_around, config)
    return near + await look_further(config, peer)
