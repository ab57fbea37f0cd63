"""A sender's connection to one receiver: a thread that connects and sends, and a reader of answers on the loop, which
also sends what is small while the thread has nothing to do."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable

from distserve.errors import DistServeError, LayoutMismatch, PeerLost, TransportError, TransportUnavailable
from distserve.messages import Endpoint, TrafficClass
from distserve.transport import framing
from distserve.transport.base import PoolMemory, Span
from distserve.transport.fence import post
from distserve.transport.framing import FrameType
from distserve.transport.options import StreamOptions
from distserve.transport.outbound import OutboundTransfer, from_our_side
from distserve.transport.outbound_queue import Job, OutboundLink, OutboundQueue
from distserve.transport.rows import SummedRows
from distserve.transport.sockets import cut, recv_exact

log = logging.getLogger(__name__)


class OutboundConnection:
    """Made for one (endpoint, traffic class); ends on the first error and is then replaced by its sender.

    Everything but enqueue_spans() is for the loop. Who holds the turn writes to the socket: the thread while anything
    is queued, else the loop; the loop alone reads from it once the peer has said WELCOME. The thread ends first, then
    the loop closes the socket and settles what was open, so that no byte of ours is read after a transfer has failed.
    """

    def __init__(
        self,
        link: OutboundLink,
        memory: PoolMemory,
        rows: SummedRows,
        endpoint: Endpoint,
        traffic_class: TrafficClass,
        sender_id: str,
        options: StreamOptions,
    ) -> None:
        self.peer = f"the {link.kind} receiver at {endpoint.address}"
        self._link = link
        self._memory = memory
        self._rows = rows
        self._endpoint = endpoint
        self._traffic_class: TrafficClass = traffic_class
        self._sender_id = sender_id
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._transfers: dict[tuple[int, int], OutboundTransfer] = {}
        self._queue = OutboundQueue(link, rows, options.peer_timeout_s)
        self._frames = framing.FrameReader(options.max_frame_meta_bytes)
        self._socket: socket.socket | None = None
        self._reading = False
        self._error: DistServeError | None = None
        self.ready: asyncio.Future[DistServeError | None] = self._loop.create_future()
        self.finished: asyncio.Future[DistServeError] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{link.kind}", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    # -- from any thread

    def enqueue_spans(self, transfer: OutboundTransfer, spans: tuple[Span, ...]) -> None:
        job = Job(transfer, spans=spans, after=self._link.mark())
        if threading.get_ident() != self._loop_thread or not self._send_now(job):
            self._queue.put(job)

    # -- on the loop

    def open(self, transfer: OutboundTransfer) -> None:
        """Raises TransportError if this sender has that very lease open already."""
        key = (transfer.lease_id, transfer.epoch)
        if key in self._transfers:
            raise TransportError(f"lease {transfer.lease_id} is open already", lease_id=transfer.lease_id)
        self._transfers[key] = transfer
        self._loop.call_soon(self._announce, transfer)
        if self._error is not None:
            transfer.settle(self._error)

    def _announce(self, transfer: OutboundTransfer) -> None:
        """OPEN, for a transfer that has nothing to write yet (else its first WRITE does) or has to wait for others:
        past all that waits, so that the receiver counts the lease among those of this connection from now on."""
        if not transfer.ending and (not transfer.begun or self._queue.busy):
            ref = framing.LeaseRef(transfer.lease_id, transfer.epoch)
            self.enqueue_urgent(framing.frame(FrameType.OPEN, ref))

    def enqueue_frame(self, transfer: OutboundTransfer, frame: Callable[[], bytes]) -> None:
        """`frame` is called after all that was queued before has been sent."""
        job = Job(transfer, frame=frame)
        if not self._send_now(job):
            self._queue.put(job)

    def enqueue_urgent(self, frame: bytes) -> None:
        """Goes before everything that is queued."""
        self._queue.put_first(frame)
        job = Job(None)
        if not self._send_now(job):
            self._queue.put(job)

    def forget(self, transfer: OutboundTransfer) -> None:
        self._transfers.pop((transfer.lease_id, transfer.epoch), None)

    def fail(self, error: DistServeError) -> None:
        """The end of this connection: idempotent. Open transfers are settled when the thread has ended."""
        if self._error is None:
            self._error = error
            if self._socket is not None:
                cut(self._socket)
            self._queue.end()

    def _send_now(self, job: Job) -> bool:
        if self._socket is None or not self._reading or self._error is not None:
            return False
        try:
            return self._queue.send_now(self._socket, job)
        except OSError as e:
            self.fail(PeerLost(f"{self.peer} is gone: {e}", peer=self._endpoint.address))
        except Exception as e:
            log.exception("sending to %s failed", self.peer)
            self.fail(TransportError(f"sending to {self.peer} failed: {type(e).__name__}: {e}"))
        return True

    def poll(self) -> None:
        """Takes in what the peer has said up to now: a connection that has ended is known to have, before it is used
        again. One in use is not asked: its end would reach the transfers on it just as soon."""
        if self._reading and not self._transfers:
            self._on_readable()

    def _on_ready(self, sock: socket.socket) -> None:
        self._socket = sock
        if self._error is not None:
            cut(sock)
            return
        self._reading = True
        self._loop.add_reader(sock.fileno(), self._on_readable)
        self.ready.set_result(None)

    def _on_readable(self) -> bool:
        """Takes in one read's worth of answers; False if there was none."""
        try:
            assert self._socket is not None
            data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
            if not data:
                raise PeerLost(f"{self.peer} closed the connection", peer=self._endpoint.address)
            for kind, head in self._frames.feed(data):
                self._answer(kind, head)
            return True
        except BlockingIOError:
            pass
        except OSError as e:
            self._stop_reading(PeerLost(f"{self.peer} is gone: {e}", peer=self._endpoint.address))
        except DistServeError as e:
            self._stop_reading(e)
        return False

    def _stop_reading(self, error: DistServeError) -> None:
        if self._reading and self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._reading = False
        self.fail(error)

    def _answer(self, kind: FrameType, head: bytes) -> None:
        if kind is FrameType.ACK:
            ack = framing.parse_body(kind, head, framing.Ack)
            transfer = self._transfers.get((ack.lease_id, ack.epoch))
            if transfer is None:
                return
            if ack.error is not None:
                transfer.settle(framing.error_of(ack.error))
            elif ack.verb == "commit":
                transfer.settle(ack.num_bytes)
            else:
                transfer.withdrawn()
        elif kind is FrameType.LOST:
            lost = framing.parse_body(kind, head, framing.Lost)
            transfer = self._transfers.get((lost.lease_id, lost.epoch))
            if transfer is not None:
                transfer.settle(framing.error_of(lost.error))
        else:
            raise TransportError(f"a {kind.name} frame from a receiver", value=kind.name)

    def _on_finished(self, error: DistServeError, sock: socket.socket | None) -> None:
        error = self._error or error
        self._error = error
        while self._reading and self._on_readable():
            pass  # an answer that came before the end still counts
        if self._reading and sock is not None:
            self._loop.remove_reader(sock.fileno())
            self._reading = False
        if sock is not None:
            self._link.close(sock)
        self._thread.join()  # it has nothing left to do but return
        self._queue.release()
        for transfer in list(self._transfers.values()):
            transfer.settle(error)
        if not self.ready.done():
            self.ready.set_result(error)
        self.finished.set_result(error)

    # -- the thread

    def _run(self) -> None:
        sock: socket.socket | None = None
        error: DistServeError = PeerLost(f"the connection to {self.peer} was closed", peer=self._endpoint.address)
        try:
            sock = self._connect()
            post(self._loop, self._on_ready, sock)
            self._queue.serve(sock)
        except EOFError:
            error = PeerLost(f"{self.peer} closed the connection", peer=self._endpoint.address)
        except OSError as e:
            error = PeerLost(f"{self.peer} is gone: {e}", peer=self._endpoint.address)
        except DistServeError as e:
            error = e
        except Exception as e:
            log.exception("sending to %s failed", self.peer)
            error = TransportError(f"sending to {self.peer} failed: {type(e).__name__}: {e}")
        if not post(self._loop, self._on_finished, error, sock) and sock is not None:
            self._link.close(sock)

    def _connect(self) -> socket.socket:
        timeout_s = self._options.connect_timeout_s
        try:
            sock = self._link.dial(self._endpoint, self._traffic_class, timeout_s)
        except OSError as e:
            raise TransportUnavailable(f"cannot reach {self.peer}: {e}", address=self._endpoint.address) from e
        try:
            hello = framing.Hello(
                kind=self._link.kind,
                sender_id=self._sender_id,
                traffic_class=self._traffic_class,
                layout=self._memory.layout,
                num_blocks=self._rows.num_blocks,
                pool=self._link.about_pool(),
            )
            self._link.greet(sock, framing.frame(FrameType.HELLO, hello), timeout_s)
            kind, length = framing.parse_header(
                recv_exact(sock, framing.HEADER.size, timeout_s), self._options.max_frame_meta_bytes
            )
            head = recv_exact(sock, length, timeout_s)
            if kind is FrameType.REFUSED:
                refusal = framing.error_of(framing.parse_body(kind, head, framing.Refused).error)
                if isinstance(refusal, LayoutMismatch):
                    raise from_our_side(refusal, self.peer)
                raise TransportUnavailable(f"{self.peer} refuses: {refusal.message}", **refusal.fields)
            framing.parse_body(kind, head, framing.Welcome)
        except BaseException:
            self._link.close(sock)
            raise
        return sock
