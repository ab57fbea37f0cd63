"""`distserve doctor --peer HOST`: latency and bandwidth of each transport to a host that runs `doctor --serve`, by the
same senders and receivers that move KV."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from distserve import __version__
from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.config import Config
from distserve.doctor.clock import judge, measure
from distserve.doctor.finding import Finding, Status, bad, ok, skip
from distserve.doctor.scratch import POOLS, scratch_pool
from distserve.errors import BusError, DistServeError, NoResponders
from distserve.lifecycle import new_id
from distserve.messages import ProbeGrantRequest, ProbeGrants, ProbeHello, ProbeHost, RemoteRegion, decode_as, encode
from distserve.transport.base import PoolMemory, Sender, Span
from distserve.transport.factory import KINDS, make_sender, unusable
from distserve.transport.select import NEED_ONE_HOST, host_key
from distserve.worker.data_plane import rdma_options, stream_options

_ASK_S = 5.0
_LEASE_S = 30.0  # for one lease, however slow the network
_KIND_S = 120.0  # for all of one transport
_WARM_LEASES = 8
_MAX_LEASES, _LATENCY_S = 512, 1.5  # leases of 4 KiB, one at a time, until either
_IN_FLIGHT, _MAX_BYTES, _BANDWIDTH_S = 4, 1 << 30, 2.0  # large ones, until either
_BATCH_S = 0.5  # what one large batch should take


Granted = Callable[[str, int, int], Awaitable[list[RemoteRegion]]]  # pool, leases, blocks of each


@dataclass(slots=True)
class Figures:
    """Seconds of each small lease, from its opening to its confirmed commit; bytes and seconds of the large ones."""

    seconds: list[float] = field(default_factory=list)
    num_bytes: int = 0
    bulk_s: float = 0.0

    def quantile(self, q: float) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(q * len(self.seconds)))]

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.bulk_s


async def check_peer(bus: Bus, config: Config, host: str) -> list[Finding]:
    """A finding for each transport, one for the peer's release if it differs, and its clock."""
    try:
        peer = await find(bus, host)
    except BusError as e:
        return [
            bad(
                "peer.reach",
                "fail",
                f"{host} does not answer: {e.message}",
                f"distserve doctor --serve --nats-url {config.bus.url}  # on {host}, and leave it running",
                host,
            )
        ]
    findings = []
    if peer.version != __version__:
        findings.append(
            bad(
                "peer.version", "warn", f"it has {peer.version}, this host {__version__}", "# one release on both", host
            )
        )
    with ExitStack() as stack:
        pools = {name: stack.enter_context(scratch_pool(name)) for name in POOLS}
        asker = new_id("doctor")
        reasons = unusable(pools["large"], rdma_options(config))
        for kind in KINDS:
            if kind == "cuda_ipc":  # the scratch pools are in host memory
                continue
            findings.append(await _check_kind(bus, config, peer, pools, asker, kind, reasons.get(kind, "")))
    try:
        findings.append(judge(await measure(bus, subjects.doctor(peer.serve_id)), host))
    except DistServeError as e:
        findings.append(skip("clock.offset", f"not told: {e.message}", host))
    return findings


async def find(bus: Bus, host: str) -> ProbeHost:
    """Who answers for the host: by the name given, else by what it resolves to. Raises BusError kinds."""
    names = {subjects.slug(host): host}
    try:
        return await _hello(bus, host)
    except NoResponders as e:
        refused = e
    try:
        async with asyncio.timeout(_ASK_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        raise refused from None
    for *_, address in found:
        name = str(address[0])
        if subjects.slug(name) in names:
            continue
        names[subjects.slug(name)] = name
        try:
            return await _hello(bus, name)
        except NoResponders:
            continue
    raise refused


async def _hello(bus: Bus, name: str) -> ProbeHost:
    answer = await bus.request(subjects.doctor(name), encode(ProbeHello()), timeout_s=_ASK_S)
    return decode_as(ProbeHost, answer)


async def _check_kind(
    bus: Bus, config: Config, peer: ProbeHost, pools: dict[str, PoolMemory], asker: str, kind: str, problem: str
) -> Finding:
    check = f"peer.{kind}"
    same_host = peer.host_key == host_key()
    if kind in NEED_ONE_HOST and not same_host:
        return skip(check, "another host", peer.host)
    if why := problem or (peer.unusable.get(kind, "not offered there") if kind not in peer.kinds else ""):
        where = "here" if problem else f"on {peer.host}"
        if config.transport.kind == kind:
            return bad(
                check,
                _severity(config, kind),
                f"can't be used {where}: {why}",
                "# see the other rows, or set transport.kind to auto",
                peer.host,
            )
        return skip(check, f"can't be used {where}: {why}", peer.host)
    try:
        async with asyncio.timeout(_KIND_S):
            figures = await _measure(bus, config, peer, pools, asker, kind)
    except (DistServeError, OSError, TimeoutError) as e:
        mends = {
            "tcp": f"# open TCP to {peer.host}: doctor --serve --bind ADDRESS:PORT takes that port and the next",
            "rdma": "# UDP port 4791 must pass both ways, and the rows on GID, MTU and marks be ok on both hosts",
        }
        said = str(e) or f"not done within {_KIND_S:g} s"
        mend = mends.get(kind, "# both must be in one network namespace")
        return bad(check, _severity(config, kind), said, mend, peer.host)
    p50, p99, rate = figures.quantile(0.5), figures.quantile(0.99), figures.bytes_per_s
    return ok(
        check,
        f"4 KiB: p50 {_time(p50)}, p99 {_time(p99)}; large: {_rate(rate)}",
        peer.host,
        p50_s=round(p50, 9),
        p99_s=round(p99, 9),
        num_leases=len(figures.seconds),
        bytes_per_s=round(rate),
        num_bytes=figures.num_bytes,
    )


def _severity(config: Config, kind: str) -> Status:
    """Of a transport that does not work: a failure if nothing that is configured would take its place."""
    t = config.transport
    needed = kind != "rdma" if t.kind == "auto" else kind == t.kind and not t.allow_fallback
    return "fail" if needed else "warn"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2f} MB/s"


async def _measure(
    bus: Bus, config: Config, peer: ProbeHost, pools: dict[str, PoolMemory], asker: str, kind: str
) -> Figures:
    figures = Figures()

    async def granted(pool: str, num_leases: int, num_blocks: int) -> list[RemoteRegion]:
        request = ProbeGrantRequest(asker=asker, kind=kind, pool=pool, num_leases=num_leases, num_blocks=num_blocks)
        answer = await bus.request(subjects.doctor(peer.serve_id), encode(request), timeout_s=_ASK_S)
        return decode_as(ProbeGrants, answer).regions

    senders: dict[str, Sender] = {}
    try:
        for name, memory in pools.items():
            senders[name] = make_sender(
                kind,
                memory,
                sender_id=f"{asker}-{name}",
                options=stream_options(config),
                rdma=rdma_options(config),
                bus=bus,
            )
        for region in await granted("small", _WARM_LEASES, 1):
            await _send(senders["small"], region, latency=True)
        began = time.perf_counter()
        while len(figures.seconds) < _MAX_LEASES and time.perf_counter() - began < _LATENCY_S:
            for region in await granted("small", 64, 1):
                sent_at = time.perf_counter()
                await _send(senders["small"], region, latency=True)
                figures.seconds.append(time.perf_counter() - sent_at)
        await _bulk(senders["large"], granted, figures)
    finally:
        for sender in senders.values():
            await sender.stop()
    return figures


async def _bulk(sender: Sender, granted: Granted, figures: Figures) -> None:
    """Batches of leases in flight together. The first, of single blocks, warms up and tells how large the others may be
    on this network; its figures count only if it was slow enough to be all there is time for."""
    room = (POOLS["large"].num_blocks - 1) // _IN_FLIGHT
    num_blocks, began = 1, time.perf_counter()
    while True:
        regions = await granted("large", _IN_FLIGHT, num_blocks)
        sent_at = time.perf_counter()
        sent = await asyncio.gather(*(_send(sender, r, latency=False) for r in regions), return_exceptions=True)
        took = time.perf_counter() - sent_at
        for result in sent:
            if isinstance(result, BaseException):
                raise result
        grown = max(1, min(room, int(num_blocks * _BATCH_S / took)))
        if num_blocks == 1 and grown > 1:
            num_blocks, began = grown, time.perf_counter()
            continue
        figures.num_bytes += sum(n for n in sent if isinstance(n, int))
        figures.bulk_s += took
        if figures.num_bytes >= _MAX_BYTES or time.perf_counter() - began >= _BANDWIDTH_S:
            return


async def _send(sender: Sender, region: RemoteRegion, *, latency: bool) -> int:
    """One lease, in the class of what decode waits for (latency) or of KV in bulk. Returns its bytes."""
    transfer = await sender.open(region, timeout_s=_LEASE_S, traffic_class="decode" if latency else "prefill")
    try:
        ids = tuple(region.block_ids)
        transfer.write([Span(0, region.layout.num_layers, ids, tuple(range(len(ids))))], awaited=latency)
        return await transfer.commit(b"", timeout_s=_LEASE_S)
    except BaseException:
        await transfer.abort("the measurement was given up")
        raise
