"""What a connection has to send, in order, and how it goes out: by a thread, or at once by the event loop while nothing
waits."""

from __future__ import annotations

import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distserve.messages import Endpoint, TrafficClass
from distserve.transport import framing
from distserve.transport.base import Span
from distserve.transport.outbound import OutboundTransfer
from distserve.transport.rows import SummedRows
from distserve.transport.sockets import Buffer, send_all, send_some
from distserve.transport.spans import Run, as_ids, pieces, runs_of


class OutboundLink(ABC):
    """What differs between kinds at the sending end. Used by connection threads; holds nothing of one connection."""

    kind: str
    frame_bytes: int  # KV in one WRITE, about
    loop_bytes: int  # KV that the loop sends and sums itself: takes about as long as a hand-over to the thread and back

    @abstractmethod
    def dial(self, endpoint: Endpoint, traffic_class: TrafficClass, timeout_s: float) -> socket.socket:
        """A connected socket. Raises OSError, TransportUnavailable."""

    def close(self, sock: socket.socket) -> None:
        """Of what dial() has given: once, by whoever has it then."""
        sock.close()

    @abstractmethod
    def greet(self, sock: socket.socket, hello: bytes, timeout_s: float) -> None:
        """Sends the first frame, and what goes beside it."""

    @abstractmethod
    def payload(self, piece: Span, runs: list[Run]) -> list[Buffer]:
        """What follows the head of a WRITE: our blocks' own bytes, sent inside the transfer's fence."""

    def mark(self) -> object:
        """What the calling thread has given the pool's device up to now: spans written now are final after it."""
        return None

    def await_mark(self, mark: object) -> None:
        """Returns when it is done. Only the connection's thread waits. Raises TransportError."""
        return

    def about_pool(self) -> bytes:
        """What the receiver needs to get at the pool, if that goes in the HELLO."""
        return b""


@dataclass(frozen=True, slots=True)
class Job:
    """Something to send. One with a transfer is skipped once the transfer has ended."""

    transfer: OutboundTransfer | None
    spans: tuple[Span, ...] = ()
    frame: Callable[[], bytes] | None = None
    after: object = None  # OutboundLink.mark() of when the spans were written


@dataclass(frozen=True, slots=True)
class _Rest:
    """What is left of frames that the loop began to send. If they are WRITEs of these spans: the transfer, inside whose
    fence this still is, and which has yet to sum them."""

    buffers: list[Buffer]
    transfer: OutboundTransfer | None
    spans: tuple[Span, ...]


class OutboundQueue:
    """Who holds the turn writes to the socket: the thread, in serve(), while anything is queued, else the loop."""

    def __init__(self, link: OutboundLink, rows: SummedRows, peer_timeout_s: float) -> None:
        self._link = link
        self._rows = rows
        self._peer_timeout_s = peer_timeout_s
        self._turn = threading.Lock()
        self._jobs: deque[Job | _Rest] = deque()  # each stays until it has been done
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # to the thread: True for a job, False to end
        self._urgent: deque[bytes] = deque()
        self._small: list[bytes] = []  # OPEN and COMMIT frames not yet sent; of who has the turn

    # -- from any thread

    @property
    def busy(self) -> bool:
        """Something waits for its turn."""
        return bool(self._jobs)

    def put(self, job: Job) -> None:
        self._jobs.append(job)
        self._calls.put(True)

    def put_first(self, frame: bytes) -> None:
        """Goes with what is sent next, before it; put() or send_now() something, so that it does."""
        self._urgent.append(frame)

    def end(self) -> None:
        """serve() returns, whatever is queued."""
        self._calls.put(False)

    # -- on the loop

    def send_now(self, sock: socket.socket, job: Job) -> bool:
        """Sends without the thread, if that is at rest and little is to be done. False: put() it. Raises OSError."""
        if self._jobs or not self._is_little(job.spans) or not self._turn.acquire(blocking=False):
            return False
        try:
            if self._jobs:
                return False
            self._send_what_fits(sock, job)
        finally:
            self._turn.release()
        return True

    def release(self) -> None:
        """When serve() has returned: what is queued is never sent."""
        for job in self._jobs:
            if isinstance(job, _Rest) and job.transfer is not None:
                job.transfer.fence.leave()
        self._jobs.clear()

    def _is_little(self, spans: tuple[Span, ...]) -> bool:
        num_layer_blocks = sum((span.layer_stop - span.layer_start) * len(span.targets) for span in spans)
        return num_layer_blocks * self._rows.layer_bytes <= self._link.loop_bytes

    def _send_what_fits(self, sock: socket.socket, job: Job) -> None:
        """With the turn. What the socket has no room for is left to the thread, as the first of its jobs."""
        transfer = job.transfer
        if transfer is not None and job.frame is not None and not transfer.fence.closed:
            self._small.append(job.frame())
        writing = transfer if job.spans and transfer is not None and transfer.fence.enter() else None
        began = time.monotonic()
        try:
            buffers = self._waiting()
            if writing is not None:
                for piece in self._pieces(job.spans):
                    buffers += self._write(writing, piece)
            rest = send_some(sock, buffers)
            if writing is not None:
                writing.sending_s += time.monotonic() - began
            if rest:
                self._jobs.appendleft(_Rest(rest, writing, job.spans))
                self._calls.put(True)
                writing = None  # the thread leaves the fence
            elif writing is not None:
                self._sum(writing, job.spans)
        finally:
            if writing is not None:
                writing.fence.leave()

    # -- the thread

    def serve(self, sock: socket.socket) -> None:
        """Sends what is queued until end(). Raises PeerLost, OSError."""
        while self._calls.get():
            with self._turn:
                while self._jobs:
                    try:
                        self._send(sock, self._jobs[0])
                    finally:
                        self._jobs.popleft()
                self._flush(sock, [])

    def _send(self, sock: socket.socket, job: Job | _Rest) -> None:
        transfer = job.transfer
        began = time.monotonic()
        if isinstance(job, _Rest):
            try:
                send_all(sock, job.buffers, self._peer_timeout_s)
                if transfer is not None:
                    transfer.sending_s += time.monotonic() - began
                    self._sum(transfer, job.spans)
            finally:
                if transfer is not None:
                    transfer.fence.leave()
            return
        if transfer is None:
            self._flush(sock, [])
            return
        if job.frame is not None and not transfer.fence.closed:
            # Names no block of ours, so it may stay behind for a while: it goes with what is sent next.
            self._small.append(job.frame())
        if job.spans:
            self._link.await_mark(job.after)
        for piece in self._pieces(job.spans):
            if not transfer.fence.enter():
                return
            try:
                began = time.monotonic()
                self._flush(sock, self._write(transfer, piece))
                transfer.sending_s += time.monotonic() - began
                self._sum(transfer, (piece,))  # after sending: the receiver is at work meanwhile
            finally:
                transfer.fence.leave()

    # -- who has the turn

    def _pieces(self, spans: tuple[Span, ...]) -> Iterator[Span]:
        for span in spans:
            yield from pieces(span, self._rows.layer_bytes, self._link.frame_bytes)

    def _write(self, transfer: OutboundTransfer, piece: Span) -> list[Buffer]:
        runs = runs_of(piece)
        head = framing.write_frame(transfer.lease_id, transfer.epoch, piece.layer_start, piece.layer_stop, runs)
        return [head, *self._link.payload(piece, runs)]

    def _sum(self, transfer: OutboundTransfer, spans: tuple[Span, ...]) -> None:
        for span in spans:
            start, stop, runs = span.layer_start, span.layer_stop, runs_of(span)
            if len(runs) == 1:
                target, first, count = runs[0]
                transfer.sums[target : target + count] += self._rows.sums(first, count, start, stop)
            elif runs:
                targets, sources = as_ids(span.targets), as_ids(span.source_blocks)
                transfer.sums[targets] += self._rows.sums_of(sources, start, stop)

    def _waiting(self) -> list[Buffer]:
        """What is urgent and what has waited, to be sent now."""
        buffers: list[Buffer] = []
        while self._urgent:
            buffers.append(self._urgent.popleft())
        buffers += self._small
        self._small.clear()
        return buffers

    def _flush(self, sock: socket.socket, write: list[Buffer]) -> None:
        """What has waited, and a WRITE: in one call, if the socket has room."""
        if buffers := self._waiting() + write:
            send_all(sock, buffers, self._peer_timeout_s)
