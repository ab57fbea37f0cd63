"""Transports by name. A new kind joins here."""

from __future__ import annotations

from distserve.errors import TransportUnavailable
from distserve.transport.base import PoolMemory, Receiver, Sender
from distserve.transport.options import StreamOptions
from distserve.transport.shm import ShmReceiver, ShmSender
from distserve.transport.tcp import TcpReceiver, TcpSender

KINDS = ("shm", "tcp")


def make_sender(kind: str, memory: PoolMemory, *, sender_id: str, options: StreamOptions | None = None) -> Sender:
    """Raises TransportUnavailable for an unknown kind, or one that this pool's memory cannot be sent by."""
    if kind == "shm":
        return ShmSender(memory, sender_id=sender_id, options=options)
    if kind == "tcp":
        return TcpSender(memory, sender_id=sender_id, options=options)
    raise _unknown(kind)


def make_receiver(
    kind: str,
    memory: PoolMemory,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise: str = "",
    path: str = "",
    options: StreamOptions | None = None,
) -> Receiver:
    """host, port and advertise are for tcp; path is for shm (empty: an abstract socket name). Raises
    TransportUnavailable for an unknown kind."""
    if kind == "shm":
        return ShmReceiver(memory, path=path, options=options)
    if kind == "tcp":
        return TcpReceiver(memory, host=host, port=port, advertise=advertise, options=options)
    raise _unknown(kind)


def usable_kinds(memory: PoolMemory) -> list[str]:
    """What this pool can be written from, preferred first: shm needs a file descriptor behind it."""
    return [kind for kind in KINDS if kind != "shm" or memory.fd is not None]


def _unknown(kind: str) -> TransportUnavailable:
    return TransportUnavailable(
        f"transport kind is {kind!r}, must be one of {', '.join(KINDS)}", kind=kind, expected=", ".join(KINDS)
    )
