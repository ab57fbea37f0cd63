"""The prefill side of the stream transports: connections by peer and class, made on first use and again after a
failure."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from distserve.errors import DistServeError, LayoutMismatch, PeerLost, TransportError, TransportUnavailable
from distserve.kv.layout import require_same
from distserve.messages import RemoteRegion, TrafficClass
from distserve.transport.base import PoolMemory, Sender, Transfer, TransferFacts
from distserve.transport.meter import Flow, Meter
from distserve.transport.options import StreamOptions
from distserve.transport.outbound import OutboundTransfer, fresh
from distserve.transport.outbound_connection import OutboundConnection
from distserve.transport.outbound_queue import OutboundLink
from distserve.transport.rows import PoolRows, SummedRows

log = logging.getLogger(__name__)

_Key: TypeAlias = tuple[str, str, TrafficClass]  # endpoint host, address, class


@dataclass(slots=True)
class _Backoff:
    delay_s: float
    until: float  # the loop's time before which no new attempt is made


class StreamSender(Sender):
    """One connection for each receiver and traffic class, shared by all its leases. For one loop.

    After a failed attempt the next waits a little, longer each time up to a bound; an open() within that time waits
    with it. No peer is ever given up for good.
    """

    def __init__(
        self,
        link: OutboundLink,
        memory: PoolMemory,
        sender_id: str,
        options: StreamOptions,
        meter: Meter | None = None,
        rows: SummedRows | None = None,
    ) -> None:
        """rows: of the memory, if it is not the host's."""
        self.kind = link.kind
        self._link = link
        self._memory = memory
        self._rows = rows or PoolRows(memory.blocks, memory.layout)
        self._sender_id = sender_id
        self._options = options
        self._meter = meter or Meter()
        self._connections: dict[_Key, OutboundConnection] = {}
        self._ended: set[OutboundConnection] = set()  # failed, their threads not yet joined
        self._backoffs: dict[_Key, _Backoff] = {}
        self._stopping = False

    async def open(
        self, region: RemoteRegion, *, timeout_s: float, traffic_class: TrafficClass = "prefill", peer: str = ""
    ) -> Transfer:
        if region.endpoint.kind != self.kind:
            raise TransportUnavailable(
                f"a {self.kind} sender cannot reach a {region.endpoint.kind} endpoint",
                kind=region.endpoint.kind,
                expected=self.kind,
            )
        require_same(self._memory.layout, region.layout)
        asked_at = time.monotonic()
        key = (region.endpoint.host, region.endpoint.address, traffic_class)
        connection = self._live(key)
        if connection is None or not connection.ready.done():
            try:
                async with asyncio.timeout(timeout_s):
                    connection = await self._connected(key, region)
            except TimeoutError:
                raise TransportUnavailable(
                    f"no connection to the {self.kind} receiver at {region.endpoint.address} within {timeout_s} s",
                    address=region.endpoint.address,
                    timeout_s=timeout_s,
                ) from None
        flow = Flow("sent", self.kind, traffic_class, peer or region.endpoint.address)
        facts = TransferFacts(
            self.kind,
            traffic_class,
            self._options.dscp.get(traffic_class, 0),
            len(region.block_ids),
            wait_s=time.monotonic() - asked_at,
        )
        transfer = OutboundTransfer(
            region, self._rows, connection, self._options.abort_timeout_s, partial(self._meter.add, flow), facts
        )
        connection.open(transfer)
        return transfer

    async def stop(self) -> None:
        """Cuts every connection; what is still open fails with PeerLost."""
        self._stopping = True
        everything = {*self._connections.values(), *self._ended}
        for connection in everything:
            connection.fail(PeerLost("this sender has stopped"))
        bound_s = self._options.connect_timeout_s + self._options.peer_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                for connection in everything:
                    await asyncio.shield(connection.finished)
        except TimeoutError:
            log.error("KV connections did not end in %s s", bound_s)

    async def _connected(self, key: _Key, region: RemoteRegion) -> OutboundConnection:
        """The live connection, or a new one. Raises what the attempt ended in."""
        loop = asyncio.get_running_loop()
        while (connection := self._live(key)) is None:
            if (backoff := self._backoffs.get(key)) is None or loop.time() >= backoff.until:
                connection = self._connect(key, region)
                break
            await asyncio.sleep(backoff.until - loop.time())
        # Shielded: the attempt goes on for others when this caller runs out of time.
        error = await asyncio.shield(connection.ready)
        if error is None:
            return connection
        if isinstance(error, LayoutMismatch | TransportError):
            raise fresh(error)  # several callers may share this attempt
        raise PeerLost(error.message)

    def _live(self, key: _Key) -> OutboundConnection | None:
        if self._stopping:
            raise TransportUnavailable(f"this {self.kind} sender has stopped")
        connection = self._connections.get(key)
        if connection is not None:
            connection.poll()
            if connection.failed:
                self._drop(key, connection)
                connection = None
        return connection

    def _connect(self, key: _Key, region: RemoteRegion) -> OutboundConnection:
        connection = OutboundConnection(
            self._link, self._memory, self._rows, region.endpoint, key[2], self._sender_id, self._options
        )
        self._connections[key] = connection
        connection.ready.add_done_callback(lambda ready: self._note_attempt(key, ready.result()))
        connection.finished.add_done_callback(lambda _: self._drop(key, connection))
        return connection

    def _note_attempt(self, key: _Key, error: DistServeError | None) -> None:
        if error is None:
            self._backoffs.pop(key, None)
            return
        last = self._backoffs.get(key)
        delay_s = self._options.backoff_s if last is None else min(last.delay_s * 2, self._options.max_backoff_s)
        self._backoffs[key] = _Backoff(delay_s, asyncio.get_running_loop().time() + delay_s)

    def _drop(self, key: _Key, connection: OutboundConnection) -> None:
        if self._connections.get(key) is connection:
            del self._connections[key]
        if connection.finished.done():
            self._ended.discard(connection)
        else:
            self._ended.add(connection)
