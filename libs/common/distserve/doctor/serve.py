"""`distserve doctor --serve`: takes scratch leases from whoever measures (`--peer`), by every transport of this host,
and tells the time. No model, no worker: two hosts can be tried before anything else runs on them."""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from distserve import __version__
from distserve.bus import subjects
from distserve.bus.base import Bus, Delivery
from distserve.config import Config
from distserve.doctor.scratch import POOLS, scratch_pool
from distserve.errors import DistServeError, MalformedMessage, Overloaded, TransportUnavailable
from distserve.kv.lease import Lease, first_epoch
from distserve.lifecycle import new_id
from distserve.messages import (
    ClockRequest,
    ProbeGrantRequest,
    ProbeGrants,
    ProbeHello,
    ProbeHost,
    RemoteRegion,
    decode,
    encode,
)
from distserve.transport.base import Receiver
from distserve.transport.factory import make_receiver, unusable, usable_kinds
from distserve.transport.select import host_key
from distserve.worker.clock import now_ns, told
from distserve.worker.data_plane import rdma_options, stream_options
from distserve.worker.reachable import reachable_host

log = logging.getLogger(__name__)

BUSY_S = 5.0  # an asker who was silent for so long has gone
_LEASE_TTL_S = 60.0
_MAX_LEASES = 256  # in one answer: well below what a NATS message holds


class ProbeService:
    """Owns the receivers' leases. One asker at a time: figures of two would be those of neither."""

    def __init__(
        self,
        serve_id: str,
        names: Sequence[str],
        receivers: Mapping[tuple[str, str], Receiver],
        problems: Mapping[str, str],
    ) -> None:
        """names: what this host is asked for by, its host name first; receivers: by (transport, pool), started;
        problems: transport -> why there is none."""
        self.serve_id = serve_id
        self._names = names
        self._host = names[0]
        self._receivers = receivers
        self._problems = dict(problems)
        self._epochs = itertools.count(first_epoch())
        self._open: dict[tuple[str, str], list[Lease]] = {}
        self._asker = ""
        self._asked_at = float("-inf")

    async def __call__(self, delivery: Delivery) -> bytes:
        received_ns = now_ns()
        match decode(delivery.data):
            case ClockRequest():
                return encode(told(received_ns))
            case ProbeHello():
                return encode(self._describe())
            case ProbeGrantRequest() as request:
                return encode(ProbeGrants(regions=await self._grant(request)))
            case other:
                kind = type(other).__name__
                raise MalformedMessage(f"`distserve doctor --serve` has no answer to {kind}", kind=kind)

    def banner(self) -> list[str]:
        """For whoever started it: what it answers by, and the other host's command."""
        kinds = list(dict.fromkeys(kind for kind, _ in self._receivers))
        lines = [f"answering for {', '.join(self._names)} by {', '.join(kinds)}; Ctrl-C ends it"]
        lines += [f"  not by {kind}: {why}" for kind, why in self._problems.items()]
        return [*lines, f"on the other host: distserve doctor --peer {self._names[0]}"]

    def _describe(self) -> ProbeHost:
        return ProbeHost(
            serve_id=self.serve_id,
            host=self._host,
            host_key=host_key(),
            version=__version__,
            kinds=list(dict.fromkeys(kind for kind, _ in self._receivers)),
            unusable=self._problems,
            pools={name: scratch.num_blocks for name, scratch in POOLS.items()},
        )

    async def _grant(self, request: ProbeGrantRequest) -> list[RemoteRegion]:
        now = time.monotonic()
        if request.asker != self._asker and now - self._asked_at < BUSY_S:
            raise Overloaded(f"{self._host} is measuring with {self._asker}", retry_after_s=BUSY_S)
        self._asker, self._asked_at = request.asker, now
        key = (request.kind, request.pool)
        receiver = self._receivers.get(key)
        if receiver is None:
            why = self._problems.get(request.kind, f"it has no {request.kind} receiver for a pool {request.pool!r}")
            raise TransportUnavailable(f"{self._host} takes nothing by {request.kind}: {why}", kind=request.kind)
        room = POOLS[request.pool].num_blocks - 1
        if request.num_blocks > room or request.num_leases > _MAX_LEASES:
            raise MalformedMessage(
                f"{request.num_leases} leases of {request.num_blocks} blocks, must be at most {_MAX_LEASES} of {room}"
            )
        for lease in self._open.pop(key, []):
            await receiver.revoke(lease.lease_id, lease.epoch)
        num_leases = min(request.num_leases, room // request.num_blocks)  # no two of them share a block
        leases = []
        for i in range(num_leases):
            first = 1 + i * request.num_blocks
            ids = list(range(first, first + request.num_blocks))
            leases.append(Lease(i + 1, next(self._epochs), ids, _LEASE_TTL_S, owner=request.asker))
        self._open[key] = leases
        return [receiver.grant(lease) for lease in leases]


@asynccontextmanager
async def serving(bus: Bus, config: Config, bind: str = "", port: int = 0) -> AsyncIterator[ProbeService]:
    """Answers until the scope ends. bind: the address that peers reach over tcp, empty: as workers choose theirs; port:
    the first of two for tcp, 0: any free ones. Raises BusError, ConfigError."""
    async with AsyncExitStack() as stack:
        serve_id, host, address = new_id("doctor"), socket.gethostname(), bind or reachable_host(config)
        receivers: dict[tuple[str, str], Receiver] = {}
        problems: dict[str, str] = {}
        for number, pool in enumerate(POOLS):
            memory = stack.enter_context(scratch_pool(pool))
            problems |= unusable(memory, rdma_options(config))
            for kind in usable_kinds(memory, rdma_options(config)):
                try:
                    receiver = make_receiver(
                        kind,
                        memory,
                        host=address,
                        port=port + number if port else 0,
                        advertise=address,
                        name=f"{serve_id}-{pool}",
                        options=stream_options(config),
                        rdma=rdma_options(config),
                        bus=bus,
                    )
                    await receiver.start(lambda commit: None, _lost)
                except (DistServeError, OSError) as e:
                    problems[kind] = str(e)
                    continue
                stack.push_async_callback(receiver.stop)
                receivers[kind, pool] = receiver
        names = _names(host, address)
        service = ProbeService(serve_id, names, receivers, problems)
        for name in names:
            await stack.enter_async_context(await bus.serve(subjects.doctor(name), service, queue="doctor"))
        await stack.enter_async_context(await bus.serve(subjects.doctor(serve_id), service))
        yield service


def _names(host: str, address: str) -> list[str]:
    """What this host is asked for by, each slug once, its name first."""
    found: dict[str, str] = {}
    for name in (host, host.partition(".")[0], address):
        found.setdefault(subjects.slug(name), name)
    return list(found.values())


def _lost(lease_id: int, epoch: int, why: Exception) -> None:
    log.info("lease %d was lost: %s", lease_id, why)
