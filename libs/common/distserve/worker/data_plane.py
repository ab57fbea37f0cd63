"""The KV data plane of a worker, from its configuration."""

import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from distserve.bus.base import Bus
from distserve.config import Config
from distserve.errors import ConfigError, DistServeError, TransportUnavailable
from distserve.messages import TrafficClass
from distserve.transport.base import Commit, OnLost, PoolMemory, Receiver, Sender
from distserve.transport.factory import KINDS, make_receiver, make_sender, rdma_unusable, unusable
from distserve.transport.meter import Meter
from distserve.transport.options import StreamOptions
from distserve.transport.rdma.options import ClassOptions, RdmaOptions
from distserve.worker.in_use import InUse
from distserve.worker.reachable import reachable_host

log = logging.getLogger(__name__)

_CLASSES: tuple[TrafficClass, ...] = ("decode", "prefill", "background")

DEVICE_SPAN = 64 << 20

# What a device may fail with when it is opened, or the pool when it is registered.
_FAILS = (TransportUnavailable, ConfigError, OSError)

T = TypeVar("T")


@dataclass(slots=True)
class DataPlane:
    """What a worker moves KV by. `kinds`: preferred first; `forced`: "auto", or the only kind allowed, unless
    `may_fall_back` (then the others stand behind it); `device`: model.device, if the pool lies there, so that there are
    no kinds but cuda_ipc and rdma; `reasons`: why it is degraded; `pool_access`: kind -> how it gets at the pool,
    of rdma once it has started."""

    kinds: list[str]
    forced: str
    may_fall_back: bool
    device: str = ""
    reasons: list[str] = field(default_factory=list)
    pool_access: dict[str, str] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    in_use: InUse = field(default_factory=InUse)

    def do_without(self, kind: str, error: DistServeError | OSError) -> None:
        """It was thought to be usable and is not. Only what needs a device may be: raises the error for another kind,
        ConfigError for one that is forced or the only one that there is."""
        if kind not in ("rdma", "cuda_ipc"):
            raise error
        if self.device and self.kinds == [kind]:
            raise _out_of_reach(self.device, str(error)) from error
        if self.forced == kind and not self.may_fall_back:
            raise _cannot(kind, str(error)) from error
        self.kinds.remove(kind)
        self._degrade(kind, str(error))

    def note_access(self, ends: Mapping[str, Sender] | Mapping[str, Receiver]) -> None:
        """Of those that have started, by kind. Only rdma has more than one way."""
        for kind in ("cuda_ipc", "rdma"):
            if kind in ends:
                self.pool_access[kind] = ends[kind].pool_access

    def _degrade(self, kind: str, why: str) -> None:
        reason = f"{kind} cannot be used here: {why}"
        self.reasons.append(reason)
        log.warning("%s; KV goes by %s", reason, ", ".join(self.kinds))
        if self.forced == kind:
            self.forced = "auto"


def check_forced(config: Config) -> None:
    """Before anything large is loaded. Raises ConfigError if rdma is forced and this host can't do it."""
    t = config.transport
    if t.kind == "rdma" and not t.allow_fallback and (why := rdma_unusable(rdma_options(config))):
        raise _cannot("rdma", why)


def plan(config: Config, memory: PoolMemory) -> DataPlane:
    """The transports to use. Raises ConfigError naming why a forced one can't be used, unless fallback is allowed, or
    why a pool in a device's memory can't be reached by any."""
    why_not = unusable(memory, rdma_options(config))
    usable = [kind for kind in KINDS if kind not in why_not]
    device = "" if memory.on_device is None else config.model.device
    if device and not usable:
        raise _out_of_reach(device, "; ".join(f"{kind}: {why_not[kind]}" for kind in ("cuda_ipc", "rdma")))
    forced, may_fall_back = config.transport.kind, config.transport.allow_fallback
    plane = DataPlane(usable, forced, may_fall_back, device)
    if forced == "auto":
        if device and "cuda_ipc" in why_not:
            log.warning("cuda_ipc is left out: %s", why_not["cuda_ipc"])
        if config.transport.rdma.devices and "rdma" in why_not:
            plane._degrade("rdma", why_not["rdma"])  # somebody counts on it
        return plane
    if forced in why_not:
        if not may_fall_back:
            raise _cannot(forced, why_not[forced], f"one of auto, {', '.join(usable)}")
        plane._degrade(forced, why_not[forced])
        return plane
    plane.kinds = [forced, *(k for k in usable if k != forced)] if may_fall_back else [forced]
    return plane


def _out_of_reach(device: str, why: str) -> ConfigError:
    return ConfigError(
        f"model.device is {device}, and KV there is handed over by cuda_ipc and rdma only, which this worker cannot "
        f"use: {why}; mend that, or take model.device cpu or decode.colocated",
        key="model.device",
        value=device,
        expected="auto or cpu, decode.colocated true, or a pool that cuda_ipc or rdma reaches",
    )


def _cannot(kind: str, why: str, expected: str = "auto, or a kind that this host can use") -> ConfigError:
    return ConfigError(
        f"transport.kind is {kind}, which this worker cannot use: {why}; mend that, take another kind or auto, or set "
        "transport.allow_fallback",
        key="transport.kind",
        value=kind,
        expected=expected,
    )


def senders(config: Config, plane: DataPlane, memory: PoolMemory, worker_id: str, bus: Bus) -> dict[str, Sender]:
    """One for each of the plane's kinds; rdma is done without if it fails and need not be, ConfigError if it must."""
    options, rdma = stream_options(config), rdma_options(config)

    def make(kind: str) -> Sender:
        return make_sender(kind, memory, sender_id=worker_id, options=options, rdma=rdma, bus=bus, meter=plane.meter)

    made = {kind: sender for kind in tuple(plane.kinds) if (sender := _tried(plane, kind, make)) is not None}
    plane.note_access(made)
    return made


async def receivers(
    config: Config,
    plane: DataPlane,
    memory: PoolMemory,
    worker_id: str,
    bus: Bus,
    *,
    on_commit: Callable[[Commit], None],
    on_lost: OnLost,
    stack: AsyncExitStack,
) -> dict[str, Receiver]:
    """One for each of the plane's kinds, started; the stack stops them. As senders() with rdma."""
    options, rdma, host = stream_options(config), rdma_options(config), reachable_host(config)

    def make(kind: str) -> Receiver:
        return make_receiver(
            kind,
            memory,
            host=host,
            port=config.transport.port,
            advertise=host,
            # A name of its own for each life of the process: who is set up with a dead one never takes us for it.
            name=f"{worker_id}-{secrets.token_hex(3)}",
            options=options,
            rdma=rdma,
            bus=bus,
            meter=plane.meter,
        )

    started: dict[str, Receiver] = {}
    for kind in tuple(plane.kinds):
        receiver = _tried(plane, kind, make)
        if receiver is None:
            continue
        try:
            await receiver.start(on_commit, on_lost)
        except _FAILS as e:
            plane.do_without(kind, e)
            continue
        stack.push_async_callback(receiver.stop)
        started[kind] = receiver
    plane.note_access(started)
    return started


def _tried(plane: DataPlane, kind: str, make: Callable[[str], T]) -> T | None:
    try:
        return make(kind)
    except _FAILS as e:
        plane.do_without(kind, e)
        return None


def span_bytes(config: Config, memory: PoolMemory) -> int:
    """KV in one write, about. Out of a GPU's memory a write costs a dozen small kernels on either side, each of which
    may wait for its turn among those of the pass."""
    return config.transport.span_bytes if memory.on_device is None else max(config.transport.span_bytes, DEVICE_SPAN)


def stream_options(config: Config) -> StreamOptions:
    t = config.transport
    return StreamOptions(
        connect_timeout_s=t.connect_timeout_s,
        frame_bytes=t.span_bytes,
        dscp={name: getattr(t.classes, name).dscp for name in _CLASSES},
    )


def rdma_options(config: Config) -> RdmaOptions:
    t, r = config.transport, config.transport.rdma
    marks = {name: getattr(t.classes, name) for name in _CLASSES}
    return RdmaOptions(
        common=stream_options(config),
        devices=r.devices,
        subnet=r.subnet,
        classes={name: ClassOptions(mark.dscp, mark.service_level) for name, mark in marks.items()},
        depth=r.depth,
        ack_timeout=r.ack_timeout,
        retry=r.retry,
        stop_timeout_s=r.stop_timeout_s,
        ping_s=r.ping_s,
        stripe_blocks=r.stripe_blocks,
        use_windows=r.use_windows,
        use_dmabuf=r.use_dmabuf,
        stage_slots=r.stage_slots,
        stage_slot_bytes=r.stage_slot_bytes,
        landing_bytes=r.landing_bytes,
        store_timeout_s=r.store_timeout_s,
        poll_cpu=None if r.poll_cpu < 0 else r.poll_cpu,
    )
