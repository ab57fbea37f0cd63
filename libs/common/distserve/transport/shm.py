"""KV over shared memory: same host, one copy, made by the receiver.

A Unix socket carries the frames. With its HELLO the sender passes the memfd behind its pool; the receiver maps it
read-only and copies blocks out into its own. So the usual danger is turned round: not the receiver's blocks are at
risk from a late writer but the sender's from being reused while they are read. Three things exclude a torn read:
the sender keeps its blocks until ACK or LOST says that nobody reads them any more, or the connection is dead; the
receiver sums what it has copied, in its own pool, after copying; and the COMMIT carries the sums that the sender made
while the blocks were its own. A block that was reused in mid-copy has other sums, and the lease is fenced.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import socket
import stat
import struct

import numpy as np
import numpy.typing as npt

from distserve.errors import TransportError, TransportUnavailable
from distserve.kv.checksum import Words
from distserve.messages import Endpoint, TrafficClass
from distserve.transport import framing
from distserve.transport.base import PoolMemory, Span
from distserve.transport.framing import Hello, WriteHead
from distserve.transport.inbound import InboundLease
from distserve.transport.inbound_connection import InboundLink
from distserve.transport.options import StreamOptions
from distserve.transport.outbound import OutboundTransfer
from distserve.transport.outbound_connection import OutboundLink
from distserve.transport.rows import PoolRows
from distserve.transport.select import host_key
from distserve.transport.sockets import recv_into, send_all, wait_readable
from distserve.transport.spans import Ids, paired_runs
from distserve.transport.stream_receiver import StreamReceiver
from distserve.transport.stream_sender import StreamSender

KIND = "shm"
FRAME_BYTES = 64 << 20  # KV named by one WRITE: no payload follows, so only its id lists bound it


class ShmReceiver(StreamReceiver):
    """Listens on a Unix socket: one in the abstract namespace, which leaves no file behind whatever happens, or a
    path (e.g. on a volume that two containers share)."""

    kind = KIND

    def __init__(self, memory: PoolMemory, *, path: str = "", options: StreamOptions | None = None) -> None:
        super().__init__(memory, options or StreamOptions())
        self._address = path or f"@distserve-kv-{os.getpid()}-{secrets.token_hex(6)}"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(kind="shm", host=host_key(), address=self._address)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if not self._address.startswith("@"):
                _remove_stale(self._address)
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

    def _link(self, sock: socket.socket) -> InboundLink:
        _require_same_user(sock)
        return _ShmInbound(sock, self._rows, self._options)


class ShmSender(StreamSender):
    """The pool must be backed by a memfd (PoolMemory.fd), sealed against shrinking."""

    def __init__(self, memory: PoolMemory, *, sender_id: str, options: StreamOptions | None = None) -> None:
        if memory.fd is None:
            raise TransportUnavailable(
                "the pool is not in shared memory (it has no file descriptor): use tcp", kind=KIND
            )
        options = options or StreamOptions()
        super().__init__(_ShmOutbound(memory.fd, options), memory, sender_id, options)


class _ShmOutbound(OutboundLink):
    kind = KIND
    frame_bytes = FRAME_BYTES

    def __init__(self, fd: int, options: StreamOptions) -> None:
        self._fd = fd
        self._options = options

    def dial(self, endpoint: Endpoint, traffic_class: TrafficClass, timeout_s: float) -> socket.socket:
        if endpoint.host != host_key():
            raise TransportUnavailable(
                f"the shm receiver {endpoint.address} is on another host or network namespace",
                theirs=endpoint.host,
                ours=host_key(),
            )
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(_name(endpoint.address))
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        return sock

    def greet(self, sock: socket.socket, hello: bytes, timeout_s: float) -> None:
        # The descriptor rides on the first byte; a fresh socket always has room for that.
        sent = socket.send_fds(sock, [hello], [self._fd], socket.MSG_NOSIGNAL)
        if sent < len(hello):
            send_all(sock, [memoryview(hello)[sent:]], timeout_s)

    def write(self, sock: socket.socket, transfer: OutboundTransfer, piece: Span, sources: Ids, targets: Ids) -> None:
        frame = framing.write_frame(
            transfer.lease_id, transfer.epoch, piece.layer_start, piece.layer_stop, targets, sources
        )
        send_all(sock, [frame], self._options.peer_timeout_s)


class _ShmInbound(InboundLink):
    kind = KIND

    def __init__(self, sock: socket.socket, rows: PoolRows, options: StreamOptions) -> None:
        self._socket = sock
        self._rows = rows
        self._options = options
        self._fds: list[int] = []
        self._map: mmap.mmap | None = None
        self._source: npt.NDArray[np.uint64] | None = None  # [num_blocks, num_layers, words] of the sender's pool
        sock.setblocking(False)

    def first(self, size: int, timeout_s: float) -> bytearray:
        wait_readable(self._socket, timeout_s)
        data, self._fds, _, _ = socket.recv_fds(self._socket, size, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise EOFError
        header = bytearray(size)
        header[: len(data)] = data
        recv_into(self._socket, memoryview(header)[len(data) :], timeout_s)
        return header

    def welcome(self, hello: Hello) -> None:
        if len(self._fds) != 1:
            raise TransportError(f"a shm sender passes 1 descriptor of its pool, {len(self._fds)} came")
        size = hello.num_blocks * self._rows.block_bytes
        self._map = _map_read_only(self._fds[0], size)
        words = np.frombuffer(self._map, np.uint64, count=size // 8)
        self._source = words.reshape(hello.num_blocks, self._rows.num_layers, -1)

    def place(self, lease: InboundLease, head: WriteHead, destinations: Ids) -> bool:
        source, sources, rows = self._source, head.sources, self._rows
        if source is None or sources is None or (len(sources) and int(sources.max()) >= len(source)):
            raise TransportError(f"a shm write to lease {lease.lease_id} names no blocks of the sender's pool")
        sums: Words = np.zeros(len(destinations), np.uint64)
        layers = min(head.layer_stop - head.layer_start, max(1, self._options.copy_bytes // rows.layer_bytes))
        blocks = max(1, self._options.copy_bytes // (layers * rows.layer_bytes))
        for position, length in paired_runs(sources, destinations):
            for i in range(position, position + length, blocks):
                n = min(blocks, position + length - i)
                src, dst = int(sources[i]), int(destinations[i])
                for a in range(head.layer_start, head.layer_stop, layers):
                    b = min(a + layers, head.layer_stop)
                    if not lease.fence.enter():
                        return False
                    try:
                        np.copyto(rows.words[dst : dst + n, a:b], source[src : src + n, a:b])
                        sums[i : i + n] += rows.sums(dst, n, a, b)  # now, while the copy is in cache
                    finally:
                        lease.fence.leave()
        lease.account(head, sums)
        return True

    def discard(self, head: WriteHead) -> None:
        pass  # no bytes follow the head

    def close(self) -> None:
        self._source = None  # lets go of the map
        if self._map is not None:
            self._map.close()
            self._map = None
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _name(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def _remove_stale(path: str) -> None:
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


def _require_same_user(sock: socket.socket) -> None:
    """Anyone in the network namespace can connect to an abstract name. Raises TransportUnavailable."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in (0, os.geteuid()):
        raise TransportUnavailable(
            f"a process of user {uid} may not write KV of user {os.geteuid()}", value=uid, expected=os.geteuid()
        )


def _map_read_only(fd: int, size: int) -> mmap.mmap:
    """Raises TransportError unless fd is shared memory of at least `size` bytes that cannot shrink under us: reading
    beyond its end would be a fatal signal."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise TransportError("the sender's pool is not sealed against shrinking (F_SEAL_SHRINK)")
        actual = os.fstat(fd).st_size
        if actual < size:
            raise TransportError(f"the sender's pool has {actual} bytes, its HELLO says {size}", size_bytes=actual)
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError) as e:
        raise TransportError(f"cannot map the sender's pool: {e}") from e
