"""The contract of every transport. tests/contracts/ runs one suite over all of them.

The decode side grants a lease on blocks of its pool (`Receiver.grant`), the region travels to the prefill side by
the bus, which opens a Transfer on it, writes spans as layers are computed, and commits. A broken peer fails the
lease and nothing else.

Late writers: once `Receiver.revoke` has returned, no byte can be written into the lease's blocks any more. Once
`Transfer.commit` or `Transfer.abort` has returned or raised, the source blocks are read no more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distserve.errors import DistServeError
from distserve.kv.lease import Lease as Lease  # part of this contract; defined where the book of leases is kept
from distserve.messages import Endpoint, KVLayout, RemoteRegion, TrafficClass
from distserve.transport.facts import TransferFacts as TransferFacts  # part of this contract

if TYPE_CHECKING:
    from distserve.transport.device_pool import DevicePool

IN_HOST_MEMORY = "host: the pool is in host memory"


@dataclass(frozen=True, slots=True)
class Span:
    """Layers [layer_start, layer_stop) of some blocks. source_blocks[i] (ids in the sender's pool) goes to the
    region's block number targets[i] (an index into region.block_ids, not an id: a sender never names foreign ids)."""

    layer_start: int
    layer_stop: int
    source_blocks: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(slots=True)
class PoolMemory:
    """A KV pool's bytes as transports see them: blocks[i] is block i, a contiguous uint8 row of block_bytes.

    blocks: numpy uint8 array [num_blocks, num_layers, layer_block_bytes]; fd: the memfd that backs it, if any
    (for shm). Both are None for a pool in a device's memory, which is `on_device` then: only cuda_ipc and rdma move
    its bytes (docs/gpu-memory.md). The memory must outlive every Sender and Receiver made on it.
    """

    layout: KVLayout
    blocks: Any  # numpy.ndarray, kept untyped so that this module needs no numpy at import
    fd: int | None = None
    on_device: DevicePool | None = None

    @property
    def device(self) -> str:
        """Where it lies: "cpu", "cuda:0"."""
        return "cpu" if self.on_device is None else self.on_device.name

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.shape[0]) if self.on_device is None else self.on_device.num_blocks


@dataclass(frozen=True, slots=True)
class Commit:
    """A lease whose every block has come and whose checksums are right. `state` is an encoded SequenceState."""

    lease_id: int
    epoch: int
    state: bytes
    num_bytes: int
    seconds: float = field(default=0.0)  # grant -> commit


OnLost = Callable[[int, int, Exception], None]  # lease_id, epoch, why


class Receiver(ABC):
    """The decode side: owns the data plane's listening end and places (or lets be placed) bytes in the pool.

    `on_commit` is called on the event loop given at start() for every verified commit, once; it returns nothing
    and must not block. The sender's commit() returns only after on_commit has returned. `on_lost` likewise for a
    lease whose sender died, cut off or failed verification: the lease is then already fenced.
    """

    kind: str

    @property
    def pool_access(self) -> str:
        """How the pool's bytes are got at, and why so, for people: "host: ...". Known once it is started."""
        return IN_HOST_MEMORY

    @abstractmethod
    async def start(self, on_commit: Callable[[Commit], None], on_lost: OnLost) -> None: ...

    @property
    @abstractmethod
    def endpoint(self) -> Endpoint: ...

    @abstractmethod
    def grant(self, lease: Lease) -> RemoteRegion: ...

    @abstractmethod
    async def revoke(self, lease_id: int, epoch: int | None = None) -> None:
        """Fence: after it returns no write can reach the lease's blocks. Idempotent; unknown ids are ignored, and so
        is a lease that is not at `epoch`, if that is given: ids are used again."""

    @abstractmethod
    def idle_s(self, lease_id: int) -> float | None:
        """Seconds since the lease's last byte or its grant; None if there is no such lease. Where leases take turns on
        one connection, bytes of others count for it too, for two minutes at most."""

    @abstractmethod
    async def stop(self) -> None: ...


class Transfer(ABC):
    """One lease being written."""

    @property
    @abstractmethod
    def failure(self) -> DistServeError | None:
        """Why this transfer can no longer commit, as soon as it is known: lets a writer stop early."""

    @property
    @abstractmethod
    def facts(self) -> TransferFacts:
        """What it has come to: all of it once commit() or abort() has returned or raised."""

    @abstractmethod
    def write(self, spans: Sequence[Span], *, awaited: bool = False) -> None:
        """Queue spans. Thread-safe, never blocks, never raises for the peer's faults: those surface in commit().
        The source blocks' bytes for these layers must be final. Each (layer, target) is written exactly once.
        awaited: nothing is left to compute, so that decode waits for these; a transport that has the traffic classes
        side by side sends such spans of a "prefill" transfer in the "decode" class."""

    @abstractmethod
    async def commit(self, state: bytes, *, timeout_s: float) -> int:
        """Send what is queued, then the state and each block's checksum; returns the bytes moved once the receiver
        has verified and adopted. Raises TransportError kinds: PeerLost, StaleEpoch, LeaseRevoked, ChecksumMismatch."""

    @abstractmethod
    async def abort(self, reason: str) -> None:
        """Give up: tells the receiver where it can. Idempotent. Never raises."""


class Sender(ABC):
    """The prefill side: owns connections to receivers, one per peer and traffic class, made on first use and again
    after a failure."""

    kind: str

    @property
    def pool_access(self) -> str:
        """As of a Receiver."""
        return IN_HOST_MEMORY

    @abstractmethod
    async def open(
        self, region: RemoteRegion, *, timeout_s: float, traffic_class: TrafficClass = "prefill", peer: str = ""
    ) -> Transfer:
        """peer: the receiving worker's id, by which its bytes are counted; empty: by the endpoint's address.
        Raises LayoutMismatch (names the field), TransportUnavailable (can't reach the endpoint), PeerLost."""

    @abstractmethod
    async def stop(self) -> None: ...
