"""KV over shared memory: same host, one copy, made by the receiver.

A Unix socket carries the frames. With its HELLO the sender passes the memfd behind its pool; the receiver maps it
read-only and copies blocks out into its own. So the usual danger is turned round: not the receiver's blocks are at
risk from a late writer but the sender's from being reused while they are read. Three things exclude a torn read:
the sender keeps its blocks until ACK or LOST says that nobody reads them any more, or the connection is dead; the
receiver sums what it has copied, in its own pool, after copying; and the COMMIT carries the sums that the sender made
while the blocks were its own. A block that was reused in mid-copy has other sums, and the lease is fenced.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from typing import Literal

import numpy as np
import numpy.typing as npt

from distserve.errors import TransportError, TransportUnavailable
from distserve.messages import Endpoint, TrafficClass
from distserve.transport.base import PoolMemory, Span
from distserve.transport.framing import Hello, WriteHead
from distserve.transport.inbound import InboundLease, Placement
from distserve.transport.inbound_connection import InboundLink
from distserve.transport.meter import Meter
from distserve.transport.options import StreamOptions
from distserve.transport.outbound_queue import OutboundLink
from distserve.transport.rows import GATHER_BYTES, PoolRows, short_runs
from distserve.transport.select import host_key
from distserve.transport.sockets import Buffer, send_all
from distserve.transport.spans import Ids, Run, spelled
from distserve.transport.steps import Step, Steps
from distserve.transport.stream_sender import StreamSender
from distserve.transport.unix_sockets import UnixReceiver, dial_unix, require_same_user

KIND = "shm"
AHEAD_BYTES = 64 << 10  # only heads come: as many as a call can bring
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
FRAME_BYTES = 64 << 20  # KV named by one WRITE: no payload follows, so only its id lists bound it


class ShmReceiver(UnixReceiver):
    kind: Literal["shm"] = "shm"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(kind=self.kind, host=host_key(), address=self._address)

    def _link(self, sock: socket.socket) -> InboundLink:
        assert isinstance(self._rows, PoolRows)
        return _ShmInbound(sock, self._rows, self._options)


class ShmSender(StreamSender):
    """The pool must be backed by a memfd (PoolMemory.fd), sealed against shrinking."""

    def __init__(
        self, memory: PoolMemory, *, sender_id: str, options: StreamOptions | None = None, meter: Meter | None = None
    ) -> None:
        if memory.fd is None:
            raise TransportUnavailable(
                "the pool is not in shared memory (it has no file descriptor): use tcp", kind=KIND
            )
        options = options or StreamOptions()
        super().__init__(_ShmOutbound(memory.fd, options), memory, sender_id, options, meter)


class _ShmOutbound(OutboundLink):
    kind = KIND
    frame_bytes = FRAME_BYTES

    def __init__(self, fd: int, options: StreamOptions) -> None:
        self._fd = fd
        self.loop_bytes = options.loop_bytes  # which are only summed

    def dial(self, endpoint: Endpoint, traffic_class: TrafficClass, timeout_s: float) -> socket.socket:
        return dial_unix(KIND, endpoint, timeout_s)

    def greet(self, sock: socket.socket, hello: bytes, timeout_s: float) -> None:
        # The descriptor rides on the first byte; a fresh socket always has room for that.
        sent = socket.send_fds(sock, [hello], [self._fd], socket.MSG_NOSIGNAL)
        if sent < len(hello):
            send_all(sock, [memoryview(hello)[sent:]], timeout_s)

    def payload(self, piece: Span, runs: list[Run]) -> list[Buffer]:
        return []  # the receiver fetches it


class _ShmInbound(InboundLink):
    kind = KIND

    def __init__(self, sock: socket.socket, rows: PoolRows, options: StreamOptions) -> None:
        super().__init__(sock, AHEAD_BYTES)
        self._socket = sock
        self._rows = rows
        self._options = options
        self._fds: list[int] = []
        self._map: mmap.mmap | None = None
        self._source: npt.NDArray[np.uint64] | None = None  # [num_blocks, num_layers, words] of the sender's pool

    def first(self, size: int) -> Steps[bytes | memoryview]:
        while True:
            try:
                data, self._fds, _, _ = socket.recv_fds(self._socket, size, 1, _RECEIVE)
                break
            except BlockingIOError:
                yield Step.WAIT
        if not data:
            raise EOFError
        # Not before: a sender that is cut off while it greets never reads why. Not later: nothing of what a stranger
        # says is taken in.
        require_same_user(self._socket)
        return data + bytes((yield from self.incoming.take(size - len(data))))

    def welcome(self, hello: Hello) -> None:
        if len(self._fds) != 1:
            raise TransportError(f"a shm sender passes 1 descriptor of its pool, {len(self._fds)} came")
        size = hello.num_blocks * self._rows.block_bytes
        self._map = _map_read_only(self._fds[0], size)
        words = np.frombuffer(self._map, np.uint64, count=size // 8)
        self._source = words.reshape(hello.num_blocks, self._rows.num_layers, -1)

    def place(self, lease: InboundLease, head: WriteHead, placements: list[Placement]) -> Steps[bool]:
        source, rows = self._source, self._rows
        if source is None or any(first + count > len(source) for _, first, _, count in placements):
            raise TransportError(f"a shm write to lease {lease.lease_id} names no blocks of the sender's pool")
        if short_runs(head.num_layer_blocks * rows.layer_bytes, len(placements)):
            return (yield from self._gather(lease, head, source, *spelled(placements)))
        limit = self._options.copy_bytes
        layers = min(head.layer_stop - head.layer_start, max(1, limit // rows.layer_bytes))
        blocks = max(1, limit // (layers * rows.layer_bytes))
        for target, first, destination, count in placements:
            for i in range(0, count, blocks):
                n, src, dst = min(blocks, count - i), first + i, destination + i
                for a in range(head.layer_start, head.layer_stop, layers):
                    b = min(a + layers, head.layer_stop)
                    if not lease.fence.enter():
                        return False
                    try:
                        np.copyto(rows.words[dst : dst + n, a:b], source[src : src + n, a:b])
                        sums = rows.sums(dst, n, a, b)  # now, while the copy is in cache
                    finally:
                        lease.fence.leave()
                    lease.account(slice(target + i, target + i + n), a, b, sums)
                    yield Step.PIECE
        return True

    def _gather(
        self,
        lease: InboundLease,
        head: WriteHead,
        source: npt.NDArray[np.uint64],
        targets: Ids,
        sources: Ids,
        destinations: Ids,
    ) -> Steps[bool]:
        """place() for many short runs: one more copy in cache instead of a call for each."""
        a, b, rows = head.layer_start, head.layer_stop, self._rows
        step = max(1, GATHER_BYTES // ((b - a) * rows.layer_bytes))
        for i in range(0, len(targets), step):
            ids = destinations[i : i + step]
            if not lease.fence.enter():
                return False
            try:
                rows.words[ids, a:b] = source[sources[i : i + step], a:b]
                sums = rows.sums_of(ids, a, b)
            finally:
                lease.fence.leave()
            lease.account(targets[i : i + step], a, b, sums)
            yield Step.PIECE
        return True

    def discard(self, head: WriteHead) -> Steps[None]:
        yield Step.PIECE  # no bytes follow the head

    def close(self) -> None:
        self._source = None  # lets go of the map
        if self._map is not None:
            self._map.close()
            self._map = None
        for fd in self._fds:
            os.close(fd)
        self._fds = []


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
