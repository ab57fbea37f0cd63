"""Transports by name. A new kind joins here."""

from __future__ import annotations

from distserve.bus.base import Bus
from distserve.errors import ConfigError, TransportUnavailable
from distserve.transport.base import PoolMemory, Receiver, Sender
from distserve.transport.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from distserve.transport.meter import Meter
from distserve.transport.options import StreamOptions
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.shm import ShmReceiver, ShmSender
from distserve.transport.tcp import TcpReceiver, TcpSender

KINDS = ("cuda_ipc", "shm", "rdma", "tcp")  # preferred first


def make_sender(
    kind: str,
    memory: PoolMemory,
    *,
    sender_id: str,
    options: StreamOptions | None = None,
    rdma: RdmaOptions | None = None,
    bus: Bus | None = None,
    meter: Meter | None = None,
) -> Sender:
    """rdma and bus are for rdma, which connects over the bus. Raises TransportUnavailable for an unknown kind, or one
    that this pool's memory or this host cannot be sent by."""
    _require_reach(kind, memory)
    if kind == "shm":
        return ShmSender(memory, sender_id=sender_id, options=options, meter=meter)
    if kind == "tcp":
        return TcpSender(memory, sender_id=sender_id, options=options, meter=meter)
    if kind == "cuda_ipc":
        return CudaIpcSender(memory, sender_id=sender_id, options=options, meter=meter)
    if kind == "rdma":
        from distserve.transport.rdma.sender import RdmaSender

        return RdmaSender(memory, _needed(bus), sender_id=sender_id, options=rdma or RdmaOptions(), meter=meter)
    raise _unknown(kind)


def make_receiver(
    kind: str,
    memory: PoolMemory,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise: str = "",
    path: str = "",
    name: str = "",
    options: StreamOptions | None = None,
    rdma: RdmaOptions | None = None,
    bus: Bus | None = None,
    meter: Meter | None = None,
) -> Receiver:
    """host, port and advertise are for tcp; path is for shm and cuda_ipc (empty: an abstract socket name); name (the
    address that peers connect to over the bus; empty: made up), rdma and bus are for rdma. Raises TransportUnavailable
    for an unknown kind, or one that this host cannot take KV into this pool by."""
    _require_reach(kind, memory)
    if kind == "shm":
        return ShmReceiver(memory, path=path, options=options, meter=meter)
    if kind == "tcp":
        return TcpReceiver(memory, host=host, port=port, advertise=advertise, options=options, meter=meter)
    if kind == "cuda_ipc":
        return CudaIpcReceiver(memory, path=path, options=options, meter=meter)
    if kind == "rdma":
        from distserve.transport.rdma.receiver import RdmaReceiver

        return RdmaReceiver(memory, _needed(bus), name=name, options=rdma or RdmaOptions(), meter=meter)
    raise _unknown(kind)


def usable_kinds(memory: PoolMemory, rdma: RdmaOptions | None = None) -> list[str]:
    """What this pool can be written from and into on this host, preferred first."""
    reasons = unusable(memory, rdma)
    return [kind for kind in KINDS if kind not in reasons]


def unusable(memory: PoolMemory, rdma: RdmaOptions | None = None) -> dict[str, str]:
    """Kinds that cannot be used here, and why."""
    reasons = {}
    if memory.on_device is not None:
        reasons = {kind: _out_of_reach(memory) for kind in ("shm", "tcp")}
        try:
            memory.on_device.share()
        except TransportUnavailable as e:
            reasons["cuda_ipc"] = e.message
    else:
        reasons["cuda_ipc"] = "the pool is in host memory"
        if memory.fd is None:
            reasons["shm"] = "the pool has no file descriptor behind it"
    if why := rdma_unusable(rdma or RdmaOptions()):
        reasons["rdma"] = why
    return reasons


def rdma_unusable(options: RdmaOptions) -> str:
    """Empty if this host has a device to use; else why not."""
    from distserve.transport.rdma import ports, verbs

    if why := verbs.available():
        return why
    try:
        ports.choose_ports(ports.discover(), options.devices, options.subnet, None)
    except (ConfigError, TransportUnavailable) as e:
        return e.message
    return ""


def _out_of_reach(memory: PoolMemory) -> str:
    return f"the pool is on {memory.device} (model.device): only cuda_ipc and rdma move KV out of and into it"


def _require_reach(kind: str, memory: PoolMemory) -> None:
    """Raises TransportUnavailable."""
    if kind in ("shm", "tcp") and memory.on_device is not None:
        raise TransportUnavailable(
            f"{kind} cannot be used: {_out_of_reach(memory)}",
            kind=kind,
            key="model.device",
            value=memory.device,
            expected="cpu, or cuda_ipc or rdma",
        )


def _needed(bus: Bus | None) -> Bus:
    if bus is None:
        raise TransportUnavailable("rdma connects over the bus, and none was given", kind="rdma")
    return bus


def _unknown(kind: str) -> TransportUnavailable:
    return TransportUnavailable(
        f"transport kind is {kind!r}, must be one of {', '.join(KINDS)}", kind=kind, expected=", ".join(KINDS)
    )
