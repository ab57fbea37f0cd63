"""KV between GPU pools of two processes of one host: one copy, made by the receiver's GPU, past the host.

As shm, but that the memory is a GPU's: a Unix socket carries the frames, the HELLO brings a handle of the sender's
pool (ipc_memory.py), and the receiver copies blocks out of it on a stream of its own. Two things differ. A sender says
that layers are ready while its GPU still computes them: it marks the moment, and a WRITE leaves only when that is
past, so that no event has to cross processes. And both sides sum blocks where they lie, on the GPU.

What excludes a torn read is what does so over shm: the sender keeps its blocks until ACK or LOST says that nobody
reads them any more, or the connection is dead; the receiver sums its own copy; the COMMIT carries the sender's sums.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import Literal

import numpy as np

from distserve.errors import TransportError, TransportUnavailable
from distserve.kv.checksum import Words
from distserve.messages import Endpoint, TrafficClass
from distserve.transport.base import PoolMemory, Span
from distserve.transport.device_pool import Attached, DeviceCopier, DevicePool
from distserve.transport.framing import Hello, WriteHead
from distserve.transport.inbound import InboundLease, Placement
from distserve.transport.inbound_connection import InboundLink
from distserve.transport.meter import Meter
from distserve.transport.options import StreamOptions
from distserve.transport.outbound_queue import OutboundLink
from distserve.transport.rows import SummedRows
from distserve.transport.select import host_key
from distserve.transport.sockets import Buffer, send_all
from distserve.transport.spans import Ids, Run, spelled
from distserve.transport.steps import Step, Steps
from distserve.transport.stream_sender import StreamSender
from distserve.transport.unix_sockets import UnixReceiver, dial_unix, require_same_user

KIND = "cuda_ipc"
AHEAD_BYTES = 64 << 10  # only heads come
FRAME_BYTES = 64 << 20  # KV named by one WRITE, about: what is copied while the next is summed
ACCESS = "cuda_ipc: the receiver's GPU reads the sender's memory"


class DeviceRows(SummedRows):
    """A pool in a GPU's memory, summed there."""

    def __init__(self, memory: PoolMemory) -> None:
        """Raises TransportUnavailable for a pool in host memory, ConfigError."""
        if memory.on_device is None:
            raise TransportUnavailable(f"{KIND} cannot be used: the pool is in host memory", kind=KIND)
        super().__init__(memory.num_blocks, memory.layout)
        self.pool: DevicePool = memory.on_device
        self.copier: DeviceCopier = memory.on_device.copier()
        self._past = self.copier.mark()

    def sums(self, first: int, count: int, layer_start: int, layer_stop: int) -> Words:
        return self.sums_of(np.arange(first, first + count, dtype=np.int64), layer_start, layer_stop)

    def sums_of(self, ids: Ids, layer_start: int, layer_stop: int) -> Words:
        return self.copier.sums(ids, layer_start, layer_stop, self._past).wait()


class CudaIpcReceiver(UnixReceiver):
    kind: Literal["cuda_ipc"] = "cuda_ipc"

    def __init__(
        self, memory: PoolMemory, *, path: str = "", options: StreamOptions | None = None, meter: Meter | None = None
    ) -> None:
        """Raises TransportUnavailable, ConfigError."""
        self._device_rows = DeviceRows(memory)
        # Nothing is for the loop: even a small copy waits for the GPU.
        options = replace(options or StreamOptions(), loop_bytes=0)
        super().__init__(memory, path=path, options=options, meter=meter, rows=self._device_rows)

    @property
    def pool_access(self) -> str:
        return ACCESS

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(kind=self.kind, host=host_key(), address=self._address)

    def _link(self, sock: socket.socket) -> InboundLink:
        return _Inbound(sock, self._device_rows)


class CudaIpcSender(StreamSender):
    def __init__(
        self, memory: PoolMemory, *, sender_id: str, options: StreamOptions | None = None, meter: Meter | None = None
    ) -> None:
        """Raises TransportUnavailable (a pool in host memory, or one that has no handle), ConfigError."""
        rows = DeviceRows(memory)
        link = _Outbound(rows.copier, rows.pool.share())
        super().__init__(link, memory, sender_id, options or StreamOptions(), meter, rows)

    @property
    def pool_access(self) -> str:
        return ACCESS


class _Outbound(OutboundLink):
    kind = KIND
    frame_bytes = FRAME_BYTES
    loop_bytes = 0

    def __init__(self, copier: DeviceCopier, shared: bytes) -> None:
        self._copier = copier
        self._shared = shared

    def dial(self, endpoint: Endpoint, traffic_class: TrafficClass, timeout_s: float) -> socket.socket:
        return dial_unix(KIND, endpoint, timeout_s)

    def greet(self, sock: socket.socket, hello: bytes, timeout_s: float) -> None:
        send_all(sock, [hello], timeout_s)

    def payload(self, piece: Span, runs: list[Run]) -> list[Buffer]:
        return []  # the receiver fetches it

    def mark(self) -> object:
        return self._copier.mark()

    def await_mark(self, mark: object) -> None:
        self._copier.await_mark(mark)

    def about_pool(self) -> bytes:
        return self._shared


class _Inbound(InboundLink):
    kind = KIND

    def __init__(self, sock: socket.socket, rows: DeviceRows) -> None:
        super().__init__(sock, AHEAD_BYTES)
        self._socket = sock
        self._rows = rows
        self._source: Attached | None = None

    def first(self, size: int) -> Steps[bytes | memoryview]:
        data = yield from self.incoming.take(size)
        require_same_user(self._socket)  # before anything of what a stranger says is taken in
        yield Step.BULK  # the driver takes its time to open a pool
        return data

    def welcome(self, hello: Hello) -> None:
        self._source = self._rows.pool.attach(hello.pool, hello.num_blocks)

    def place(self, lease: InboundLease, head: WriteHead, placements: list[Placement]) -> Steps[bool]:
        source, rows = self._source, self._rows
        if not placements:
            return True
        if source is None or any(first + count > source.num_blocks for _, first, _, count in placements):
            raise TransportError(f"a write to lease {lease.lease_id} names no blocks of the sender's pool")
        a, b = head.layer_start, head.layer_stop
        targets, sources, destinations = spelled(placements)
        step = max(1, FRAME_BYTES // ((b - a) * rows.layer_bytes))
        for i in range(0, len(targets), step):
            if not lease.fence.enter():
                return False
            try:
                sums = rows.copier.take(source, sources[i : i + step], destinations[i : i + step], a, b).wait()
            finally:
                lease.fence.leave()
            lease.account(targets[i : i + step], a, b, sums)
            yield Step.PIECE
        return True

    def discard(self, head: WriteHead) -> Steps[None]:
        yield Step.PIECE  # no bytes follow the head

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:  # the driver may wait for the device, and this may be the event loop
            threading.Thread(target=source.close, name="kv-close-cuda_ipc").start()
