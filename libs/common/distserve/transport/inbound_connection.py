"""One sender's connection at the receiver: reads frames and places what they bring, on the loop or on a thread."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from distserve.errors import Cancelled, DistServeError, PeerLost, TransportError
from distserve.kv.layout import layer_block_bytes, require_same
from distserve.messages import KVLayout
from distserve.transport import framing
from distserve.transport.framing import CommitHead, FrameType, Hello, WriteHead
from distserve.transport.inbound import InboundLease, InboundLeases, Placement
from distserve.transport.meter import Flow
from distserve.transport.sockets import Incoming, cut, send_now
from distserve.transport.steps import Step, Stepper, Steps

log = logging.getLogger(__name__)


class InboundLink(ABC):
    """What differs between kinds at the receiving end of one connection. Used by whoever has its steps."""

    kind: str

    def __init__(self, sock: socket.socket, ahead_bytes: int) -> None:
        """ahead_bytes: as Incoming's."""
        self.incoming = Incoming(sock, ahead_bytes)

    @abstractmethod
    def first(self, size: int) -> Steps[bytes | memoryview]:
        """The connection's first `size` bytes, with whatever comes beside them. Raises as Incoming.take()."""

    @abstractmethod
    def welcome(self, hello: Hello) -> None:
        """The layouts agree; get ready for writes. Raises DistServeError to refuse."""

    @abstractmethod
    def place(self, lease: InboundLease, head: WriteHead, placements: list[Placement]) -> Steps[bool]:
        """Moves a WRITE's bytes into our blocks, inside the lease's fence one bounded call at a time, and accounts for
        them. False if the fence closed on the way. Raises TransportError for sources that do not exist. In either
        case the stream is then at the next frame."""

    @abstractmethod
    def discard(self, head: WriteHead) -> Steps[None]:
        """Skips a WRITE's bytes."""

    @abstractmethod
    def close(self) -> None: ...


class ConnectionEvents(Protocol):
    """Called on the event loop, in order."""

    def committed(self, connection: InboundConnection, lease: InboundLease, state: bytes) -> None: ...
    def failed(self, connection: InboundConnection, lease: InboundLease, error: DistServeError, verb: str) -> None: ...
    def closed(self, connection: InboundConnection, error: DistServeError) -> None: ...


class InboundConnection:
    """Owns its socket and its link from the accept on; both are closed at the end of the stream."""

    def __init__(
        self,
        sock: socket.socket,
        link: InboundLink,
        layout: KVLayout,
        leases: InboundLeases,
        events: ConnectionEvents,
        *,
        hello_timeout_s: float,
        max_meta_bytes: int,
        loop_bytes: int,
    ) -> None:
        self.sender_id = "a peer that has not said who it is"
        self.flow = Flow("received", link.kind, "background", "")  # until HELLO says more
        self._sock = sock
        self._link = link
        self._layout = layout
        self._leases = leases
        self._events = events
        self._hello_timeout_s = hello_timeout_s
        self._max_meta_bytes = max_meta_bytes
        self._loop_blocks = loop_bytes // layer_block_bytes(layout)
        self._send_lock = threading.Lock()
        self._told: dict[int, int] = {}  # lease_id -> epoch that the sender knows to be dead; bounded by slots
        self._overdue: DistServeError | None = None
        self.heard_at = 0.0  # time.monotonic() of the last KV, of any lease
        self._actions: dict[FrameType, Callable[[memoryview], None]] = {
            FrameType.OPEN: self._open,
            FrameType.COMMIT: self._commit,
            FrameType.ABORT: self._abort,
        }
        self._stepper = Stepper(self._serve(), sock, self._close, self._ended, f"kv-receive-{link.kind}")

    # -- on the loop

    def start(self) -> None:
        self._greeting = asyncio.get_running_loop().call_later(self._hello_timeout_s, self._not_greeted)
        self._stepper.start()

    def _not_greeted(self) -> None:
        self._overdue = PeerLost(
            f"the peer sent nothing for {self._hello_timeout_s} s that greets", timeout_s=self._hello_timeout_s
        )
        self.send(framing.frame(FrameType.REFUSED, framing.Refused(framing.wire_error(self._overdue))))
        self.cut()

    def _ended(self, raised: BaseException | None) -> None:
        self._stepper.call(self._greeting.cancel)
        error: DistServeError
        if self._overdue is not None:
            error = self._overdue
        elif isinstance(raised, EOFError):
            error = PeerLost(f"{self.sender_id} closed the connection", peer=self.sender_id)
        elif isinstance(raised, OSError):
            error = PeerLost(f"the connection from {self.sender_id} broke: {raised}", peer=self.sender_id)
        elif isinstance(raised, DistServeError):
            log.warning("the KV connection from %s is cut: %s", self.sender_id, raised)
            error = raised
        else:
            log.error("the KV connection from %s is cut", self.sender_id, exc_info=raised)
            error = TransportError(f"receiving failed: {type(raised).__name__}: {raised}")
        self._events.closed(self, error)

    # -- from any thread

    def send(self, frame: bytes) -> None:
        """A small frame to the sender. One that does not go at once means that it does not read: the end."""
        with self._send_lock:
            if self._sock.fileno() >= 0 and not send_now(self._sock, frame):
                cut(self._sock)

    def tell_lost(self, lease_id: int, epoch: int, error: DistServeError) -> None:
        """LOST, once a lease: we write its blocks no more, and read the sender's no more."""
        if self._told.get(lease_id) == epoch:
            return
        self._told[lease_id] = epoch
        self.send(framing.frame(FrameType.LOST, framing.Lost(lease_id, epoch, framing.wire_error(error))))

    def cut(self) -> None:
        with self._send_lock:
            if self._sock.fileno() >= 0:
                cut(self._sock)

    def _close(self) -> None:
        self._link.close()
        with self._send_lock:
            self._sock.close()

    # -- the steps

    def _serve(self) -> Steps[None]:
        yield from self._greet()
        incoming, header_bytes, max_bytes = self._link.incoming, framing.HEADER.size, self._max_meta_bytes
        while True:
            while not incoming.has(header_bytes):
                yield Step.IDLE
            yield Step.PIECE
            kind, length = framing.parse_header((yield from incoming.take(header_bytes)), max_bytes)
            meta = yield from incoming.take(length)
            if kind is FrameType.WRITE:
                yield from self._write(meta)
                continue
            action = self._actions.get(kind)
            if action is None:
                raise TransportError(f"a {kind.name} frame from a sender", value=kind.name)
            action(meta)

    def _greet(self) -> Steps[None]:
        """HELLO in, WELCOME or REFUSED out. A refusal names what differs on both sides."""
        try:
            first = yield from self._link.first(framing.HEADER.size)
            kind, length = framing.parse_header(first, self._max_meta_bytes)
            hello = framing.parse_body(kind, (yield from self._link.incoming.take(length)), Hello)
            self.sender_id = hello.sender_id
            self.flow = Flow("received", self._link.kind, hello.traffic_class, hello.sender_id)
            if hello.kind != self._link.kind:
                raise TransportError(f"a {hello.kind} sender on a {self._link.kind} connection", value=hello.kind)
            require_same(self._layout, hello.layout)
            self._link.welcome(hello)
        except DistServeError as e:
            self.send(framing.frame(FrameType.REFUSED, framing.Refused(framing.wire_error(e))))
            raise
        self._greeting.cancel()
        self.send(framing.frame(FrameType.WELCOME, framing.Welcome(layout=self._layout)))

    def _claim(self, lease_id: int, epoch: int) -> InboundLease | None:
        lease = self._leases.claim(lease_id, epoch, self)
        if isinstance(lease, DistServeError):
            self.tell_lost(lease_id, epoch, lease)
            return None
        return lease

    def _open(self, meta: memoryview) -> None:
        ref = framing.parse_body(FrameType.OPEN, meta, framing.LeaseRef)
        self._claim(ref.lease_id, ref.epoch)

    def _write(self, meta: memoryview) -> Steps[None]:
        head = framing.parse_write(meta)
        lease = self._claim(head.lease_id, head.epoch)
        # By lease, not by frame: a large one comes in many small frames, and would keep the loop all the same.
        if (head.num_layer_blocks if lease is None else lease.placed.size) > self._loop_blocks:
            yield Step.BULK
        if lease is None:
            yield from self._link.discard(head)
            return
        try:
            placements = lease.placements(head)
        except TransportError as e:
            yield from self._link.discard(head)
            self._fail(lease, e, "write")
            return
        try:
            yield from self._link.place(lease, head, placements)  # False: revoked meanwhile; revoke() tells the sender
            self.heard_at = time.monotonic()
        except TransportError as e:
            self._fail(lease, e, "write")

    def _commit(self, meta: memoryview) -> None:
        head: CommitHead = framing.parse_commit(meta)
        lease = self._claim(head.lease_id, head.epoch)
        if lease is None:
            return
        try:
            lease.verify(head)
        except DistServeError as e:
            self._fail(lease, e, "commit")
            return
        # From here on the blocks are the owner's: no later frame, nor a second COMMIT, gets at them.
        lease.fence.close()
        self._stepper.call(self._events.committed, self, lease, head.state)

    def _abort(self, meta: memoryview) -> None:
        ref = framing.parse_body(FrameType.ABORT, meta, framing.LeaseRef)
        lease = self._leases.get(ref.lease_id)
        if lease is None or lease.epoch != ref.epoch or lease.connection not in (None, self):
            self.send(framing.frame(FrameType.ACK, framing.Ack(ref.lease_id, ref.epoch, "abort")))
            return
        self._told[ref.lease_id] = ref.epoch
        error = Cancelled(
            f"{self.sender_id} gave lease {ref.lease_id} up: {ref.reason}", lease_id=ref.lease_id, reason=ref.reason
        )
        self._fail(lease, error, "abort")

    def _fail(self, lease: InboundLease, error: DistServeError, verb: str) -> None:
        # Nobody else places bytes under the lease, so closing the fence here is the whole fence.
        lease.fence.close()
        if verb == "write":
            self.tell_lost(lease.lease_id, lease.epoch, error)
        self._stepper.call(self._events.failed, self, lease, error, verb)
