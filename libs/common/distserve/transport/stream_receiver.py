"""The decode side of the stream transports: a listening socket, a connection for each sender, callbacks on the loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from abc import abstractmethod
from collections.abc import Callable

from distserve.errors import DistServeError, LeaseRevoked, PeerLost, TransportError
from distserve.messages import Endpoint, RemoteRegion
from distserve.transport import framing
from distserve.transport.base import Commit, Lease, OnLost, PoolMemory, Receiver
from distserve.transport.framing import FrameType
from distserve.transport.inbound import InboundLease, InboundLeases
from distserve.transport.inbound_connection import InboundConnection, InboundLink
from distserve.transport.meter import Meter
from distserve.transport.options import StreamOptions
from distserve.transport.rows import PoolRows, SummedRows

log = logging.getLogger(__name__)

TURN_LIMIT_S = 120.0  # for which a lease may wait behind others on its connection, before it counts as silent
ACCEPT_PAUSE_S = 0.1  # after an accept that failed (out of file descriptors): the listener would be ready at once again


class StreamReceiver(Receiver):
    """Places what senders write. All public methods are for the loop that start() ran on.

    stop() ends every open lease without telling the owner, who is the one that stops.
    """

    kind: str

    def __init__(
        self, memory: PoolMemory, options: StreamOptions, meter: Meter | None = None, rows: SummedRows | None = None
    ) -> None:
        """rows: of the memory, if it is not the host's."""
        self._memory = memory
        self._options = options
        self._meter = meter or Meter()
        self._rows = rows or PoolRows(memory.blocks, memory.layout)
        self._leases = InboundLeases(self._rows)
        self._connections: set[InboundConnection] = set()
        self._listener: socket.socket | None = None
        self._idle: asyncio.Event | None = None  # set while there is no connection
        self._stopping = False

    # -- what a kind provides

    @abstractmethod
    def _listen(self) -> socket.socket:
        """A bound, listening, non-blocking socket. Raises TransportUnavailable."""

    @abstractmethod
    def _link(self, sock: socket.socket) -> InboundLink:
        """The receiving end of an accepted connection. Raises DistServeError to turn it away."""

    def _unlisten(self) -> None:
        """After the listener is closed: remove what it left."""

    # -- Receiver

    async def start(self, on_commit: Callable[[Commit], None], on_lost: OnLost) -> None:
        if self._listener is not None or self._stopping:
            raise TransportError(f"this {self.kind} receiver was started before")
        self._on_commit, self._on_lost = on_commit, on_lost
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._listener = self._listen()
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def grant(self, lease: Lease) -> RemoteRegion:
        """Opens the lease for writing by whoever names its id and epoch first. Raises KVError."""
        endpoint = self.endpoint
        self._leases.add(lease)
        return RemoteRegion(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            endpoint=endpoint,
            block_ids=list(lease.block_ids),
            layout=self._memory.layout,
        )

    async def revoke(self, lease_id: int, epoch: int | None = None) -> None:
        lease = self._leases.get(lease_id)
        if lease is None or epoch not in (None, lease.epoch):
            return
        self._leases.remove(lease)
        await lease.fence.shut()
        if isinstance(lease.connection, InboundConnection):
            error = LeaseRevoked(f"lease {lease_id} was revoked", lease_id=lease_id, epoch=lease.epoch)
            lease.connection.tell_lost(lease_id, lease.epoch, error)

    def idle_s(self, lease_id: int) -> float | None:
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        silent_s = time.monotonic() - lease.active_at
        if silent_s > TURN_LIMIT_S or not isinstance(lease.connection, InboundConnection):
            return silent_s
        # One connection carries many leases, in turn: one that waits for others to pass is not silent.
        return min(silent_s, time.monotonic() - lease.connection.heard_at)

    async def stop(self) -> None:
        if self._listener is None or self._idle is None:
            return
        self._stopping = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        self._unlisten()
        for connection in self._connections:
            connection.cut()  # first: what senders see is a lost peer, not revoked leases
        for lease in self._leases.drain():
            await lease.fence.shut()
        try:
            async with asyncio.timeout(self._options.peer_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.error("%d KV connections did not end in %s s", len(self._connections), self._options.peer_timeout_s)

    # -- connections; on the loop

    def _accept(self) -> None:
        if self._listener is None or self._idle is None:
            return
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as e:
            log.error("cannot take a KV connection: %s", e)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again)
            return
        try:
            link = self._link(sock)
        except (DistServeError, OSError) as e:
            log.warning("a KV connection is turned away: %s", e)
            sock.close()
            return
        connection = InboundConnection(
            sock,
            link,
            self._memory.layout,
            self._leases,
            self,
            hello_timeout_s=self._options.connect_timeout_s,
            max_meta_bytes=self._options.max_frame_meta_bytes,
            loop_bytes=self._options.loop_bytes,
        )
        self._connections.add(connection)
        self._idle.clear()
        connection.start()

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    # -- ConnectionEvents

    def committed(self, connection: InboundConnection, lease: InboundLease, state: bytes) -> None:
        if not self._leases.remove(lease):
            return  # revoked after the last byte was verified: the sender has been told
        commit = Commit(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            state=state,
            num_bytes=lease.num_bytes,
            seconds=time.monotonic() - lease.granted_at,
        )
        try:
            self._on_commit(commit)
        except Exception as e:
            log.exception("lease %d came whole but was not adopted", lease.lease_id)
            self._report_lost(lease, e)
            self._acknowledge(connection, lease, "commit", e)
            return
        self._meter.add(connection.flow, commit.num_bytes, commit.seconds)
        self._acknowledge(connection, lease, "commit", None)

    def failed(self, connection: InboundConnection, lease: InboundLease, error: DistServeError, verb: str) -> None:
        if self._leases.remove(lease):
            self._report_lost(lease, error)
        if verb != "write":
            self._acknowledge(connection, lease, verb, None if verb == "abort" else error)

    def closed(self, connection: InboundConnection, error: DistServeError) -> None:
        for lease in self._leases.of(connection):
            lease.fence.close()  # nobody is inside: the stream has ended
            if self._leases.remove(lease):
                self._report_lost(lease, error if isinstance(error, TransportError) else PeerLost(str(error)))
        self._connections.discard(connection)
        if not self._connections and self._idle is not None:
            self._idle.set()

    def _acknowledge(
        self, connection: InboundConnection, lease: InboundLease, verb: str, error: Exception | None
    ) -> None:
        ack = framing.Ack(
            lease.lease_id,
            lease.epoch,
            "abort" if verb == "abort" else "commit",
            num_bytes=lease.num_bytes,
            error=None if error is None else framing.wire_error(error),
        )
        connection.send(framing.frame(FrameType.ACK, ack))

    def _report_lost(self, lease: InboundLease, error: Exception) -> None:
        if self._stopping:
            return
        try:
            self._on_lost(lease.lease_id, lease.epoch, error)
        except Exception:
            log.exception("on_lost of lease %d raised", lease.lease_id)

    @property
    @abstractmethod
    def endpoint(self) -> Endpoint: ...
