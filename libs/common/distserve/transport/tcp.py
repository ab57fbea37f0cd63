"""KV over TCP: anywhere an address reaches. Bytes go straight between pool and socket, vectored, uncopied in Python.

The receiver places the bytes itself, so the fence is its own: it looks at lease and epoch before each non-blocking
receive into the pool, and takes what comes for a dead lease into nothing.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from distserve.errors import TransportUnavailable
from distserve.messages import Endpoint, TrafficClass
from distserve.transport.base import PoolMemory, Span
from distserve.transport.framing import Hello, WriteHead
from distserve.transport.inbound import InboundLease, Placement
from distserve.transport.inbound_connection import InboundLink
from distserve.transport.meter import Meter
from distserve.transport.options import StreamOptions
from distserve.transport.outbound_queue import OutboundLink
from distserve.transport.packets import PacketCounts
from distserve.transport.rows import PoolRows, short_runs
from distserve.transport.sockets import Buffer, send_all
from distserve.transport.spans import Run, spelled
from distserve.transport.steps import Steps
from distserve.transport.stream_receiver import StreamReceiver
from distserve.transport.stream_sender import StreamSender

KIND = "tcp"
RECV_BYTES = 1 << 20  # one receive: how long a fence can be held
LOOP_BYTES = 256 << 10  # what a loop sends itself: the kernel copies each byte, and at once for a peer that is near
AHEAD_BYTES = 4 << 10  # read beyond a payload: the heads that follow it, mostly


class TcpReceiver(StreamReceiver):
    """Listens on (host, port); port 0 takes a free one. `advertise` is the address peers are given, if it differs
    (listening on 0.0.0.0)."""

    kind = KIND

    def __init__(
        self,
        memory: PoolMemory,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        options: StreamOptions | None = None,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(memory, options or StreamOptions(), meter)
        self._host, self._port = host, port
        self._advertise = advertise or host

    @property
    def endpoint(self) -> Endpoint:
        if not self._port:
            raise TransportUnavailable("the tcp receiver has no port before start()")
        return Endpoint(kind="tcp", host=self._advertise, address=_join(self._advertise, self._port))

    def _listen(self) -> socket.socket:
        try:
            family, _, _, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address[:2], family=family, backlog=64)
        except OSError as e:
            raise TransportUnavailable(
                f"cannot listen on {_join(self._host, self._port)}: {e}", address=_join(self._host, self._port)
            ) from e
        listener.setblocking(False)
        self._port = listener.getsockname()[1]
        return listener

    def _link(self, sock: socket.socket) -> InboundLink:
        assert isinstance(self._rows, PoolRows)
        return _TcpInbound(sock, self._rows, self._options, self._meter.packets)


class TcpSender(StreamSender):
    def __init__(
        self, memory: PoolMemory, *, sender_id: str, options: StreamOptions | None = None, meter: Meter | None = None
    ) -> None:
        options, meter = options or StreamOptions(), meter or Meter()
        link = _TcpOutbound(PoolRows(memory.blocks, memory.layout), options, meter.packets)
        super().__init__(link, memory, sender_id, options, meter)


class _TcpOutbound(OutboundLink):
    kind = KIND

    def __init__(self, rows: PoolRows, options: StreamOptions, packets: PacketCounts) -> None:
        self._rows = rows
        self._options = options
        self._packets = packets
        self.frame_bytes = options.frame_bytes
        self.loop_bytes = min(options.loop_bytes, LOOP_BYTES)

    def dial(self, endpoint: Endpoint, traffic_class: TrafficClass, timeout_s: float) -> socket.socket:
        host, _, port = endpoint.address.rpartition(":")
        if not host or not port.isdigit():
            raise TransportUnavailable(
                f"{endpoint.address!r} is no tcp address, must be host:port", address=endpoint.address
            )
        last = OSError(errno.EADDRNOTAVAIL, f"no address for {host}")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, protocol)
            try:
                _tune(sock, self._options)
                _mark(sock, self._options.dscp.get(traffic_class, 0))  # before connecting: the SYN is marked too
                sock.settimeout(timeout_s)
                sock.connect(address)
                sock.setblocking(False)
                self._packets.opened(sock)
                return sock
            except OSError as e:
                sock.close()
                last = e
        raise last

    def close(self, sock: socket.socket) -> None:
        self._packets.closing(sock)
        sock.close()

    def greet(self, sock: socket.socket, hello: bytes, timeout_s: float) -> None:
        send_all(sock, [hello], timeout_s)

    def payload(self, piece: Span, runs: list[Run]) -> list[Buffer]:
        start, stop, ranges = piece.layer_start, piece.layer_stop, self._rows.ranges
        return [view for _, first, count in runs for view in ranges(first, count, start, stop)]


class _TcpInbound(InboundLink):
    kind = KIND

    def __init__(self, sock: socket.socket, rows: PoolRows, options: StreamOptions, packets: PacketCounts) -> None:
        super().__init__(sock, AHEAD_BYTES)
        self._socket = sock
        self._rows = rows
        self._options = options
        self._packets = packets
        _tune(sock, options)
        packets.opened(sock)

    def first(self, size: int) -> Steps[bytes | memoryview]:
        return (yield from self.incoming.take(size))

    def welcome(self, hello: Hello) -> None:
        _mark(self._socket, self._options.dscp.get(hello.traffic_class, 0))  # our answers travel in the same class

    def place(self, lease: InboundLease, head: WriteHead, placements: list[Placement]) -> Steps[bool]:
        def guarded(receive: Callable[[], int]) -> int:
            if not lease.fence.enter():
                return -1
            try:
                received = receive()
            finally:
                lease.fence.leave()
            lease.touch()
            return received

        rows, start, stop = self._rows, head.layer_start, head.layer_stop
        ranges = [view for _, _, first, count in placements for view in rows.ranges(first, count, start, stop)]
        if not (yield from self.incoming.scatter(ranges, RECV_BYTES, guarded)) or not lease.fence.enter():
            return False
        try:
            if short_runs(head.num_layer_blocks * rows.layer_bytes, len(placements)):
                targets, _, ids = spelled(placements)
                lease.account(targets, start, stop, rows.sums_of(ids, start, stop))
            else:
                for target, _, first, count in placements:
                    lease.account(slice(target, target + count), start, stop, rows.sums(first, count, start, stop))
        finally:
            lease.fence.leave()
        return True

    def discard(self, head: WriteHead) -> Steps[None]:
        yield from self.incoming.discard(head.num_layer_blocks * self._rows.layer_bytes)

    def close(self) -> None:
        self._packets.closing(self._socket)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tune(sock: socket.socket, options: StreamOptions) -> None:
    """No delay, and a silent peer is noticed within about peer_timeout_s, idle or not."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = max(1, round(options.peer_timeout_s / 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, third)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, third)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(options.peer_timeout_s * 1000))


def _mark(sock: socket.socket, dscp: int) -> None:
    """The DSCP is the upper six bits of the traffic class octet."""
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
        return
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
