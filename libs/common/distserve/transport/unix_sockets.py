"""What transports within one host share: a Unix socket that carries the frames, and who may connect to it."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
import struct

from distserve.errors import TransportUnavailable
from distserve.messages import Endpoint
from distserve.transport.base import PoolMemory
from distserve.transport.meter import Meter
from distserve.transport.options import StreamOptions
from distserve.transport.rows import SummedRows
from distserve.transport.select import host_key
from distserve.transport.stream_receiver import StreamReceiver


class UnixReceiver(StreamReceiver):
    """Listens on a Unix socket: one in the abstract namespace, which leaves no file behind whatever happens, or a
    path (e.g. on a volume that two containers share)."""

    def __init__(
        self,
        memory: PoolMemory,
        *,
        path: str = "",
        options: StreamOptions | None = None,
        meter: Meter | None = None,
        rows: SummedRows | None = None,
    ) -> None:
        super().__init__(memory, options or StreamOptions(), meter, rows)
        self._address = path or f"@distserve-kv-{os.getpid()}-{secrets.token_hex(6)}"

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if not self._address.startswith("@"):
                remove_stale(self._address)
            listener.bind(_name(self._address))
            listener.listen(64)
        except OSError as e:
            listener.close()
            raise TransportUnavailable(f"cannot listen on {self._address}: {e}", address=self._address) from e
        listener.setblocking(False)
        return listener

    def _unlisten(self) -> None:
        if not self._address.startswith("@"):
            try:
                os.unlink(self._address)
            except FileNotFoundError:
                pass


def dial_unix(kind: str, endpoint: Endpoint, timeout_s: float) -> socket.socket:
    """A connected socket, non-blocking. Raises TransportUnavailable for one on another host, OSError."""
    if endpoint.host != host_key():
        raise TransportUnavailable(
            f"the {kind} receiver {endpoint.address} is on another host or network namespace",
            theirs=endpoint.host,
            ours=host_key(),
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(_name(endpoint.address))
        require_same_user(sock)  # a name is free for anybody once its owner is gone
        sock.setblocking(False)
    except (OSError, TransportUnavailable):
        sock.close()
        raise
    return sock


def _name(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def remove_stale(path: str) -> None:
    """Removes a socket that a dead process left at `path`; one that somebody listens on is left for bind to refuse."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)


def require_same_user(sock: socket.socket) -> None:
    """Of both ends: anyone in the network namespace can connect to an abstract name, or listen on one that is free.
    Raises TransportUnavailable."""
    uid = user_of(sock)
    if uid not in (0, os.geteuid()):
        raise TransportUnavailable(
            f"a process of user {uid} may not share KV with one of user {os.geteuid()}",
            value=uid,
            expected=os.geteuid(),
        )


def user_of(sock: socket.socket) -> int:
    """The user id of the process that connected (SO_PEERCRED, unix(7))."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
