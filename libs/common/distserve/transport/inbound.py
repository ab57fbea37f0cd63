"""A lease as the receiver sees it: what has come, what it sums up to, and the fence round its blocks."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from distserve.errors import ChecksumMismatch, DistServeError, KVError, LeaseRevoked, StaleEpoch, TransportError
from distserve.kv.checksum import Words
from distserve.transport.base import Lease
from distserve.transport.fence import Fence
from distserve.transport.framing import CommitHead, WriteHead
from distserve.transport.rows import PoolShape
from distserve.transport.spans import Ids, as_ids, runs

Placement: TypeAlias = tuple[int, int, int, int]  # first target, first source, first block of ours, how many


@dataclass(slots=True, eq=False)
class InboundLease:
    """One granted lease. Its sums and coverage are changed only by the thread of the connection that opened it."""

    lease_id: int
    epoch: int
    block_ids: Ids
    rows: PoolShape
    granted_at: float = field(default_factory=time.monotonic)
    active_at: float = 0.0
    fence: Fence = field(default_factory=Fence)
    connection: object | None = None  # the one that opened it
    sums: Words = field(init=False)  # [num_blocks], of what was placed so far
    placed: npt.NDArray[np.bool_] = field(init=False)  # [num_layers, num_blocks]
    num_placed: int = 0  # layer blocks, doubles counted
    _ids: list[int] = field(init=False)
    _stops: list[int] = field(init=False, default_factory=list)  # of _stretches()

    def __post_init__(self) -> None:
        self.active_at = self.granted_at
        self._ids = self.block_ids.tolist()
        self.sums = np.zeros(len(self.block_ids), np.uint64)
        self.placed = np.zeros((self.rows.num_layers, len(self.block_ids)), np.bool_)

    @property
    def num_bytes(self) -> int:
        return len(self.block_ids) * self.rows.block_bytes

    def placements(self, head: WriteHead) -> list[Placement]:
        """Where a WRITE's runs go in our pool, in their order, cut where our blocks are no neighbours. Raises
        TransportError if it points outside the lease."""
        n = len(self._ids)
        if not 0 <= head.layer_start < head.layer_stop <= self.rows.num_layers:
            raise TransportError(
                f"a write to layers [{head.layer_start}, {head.layer_stop}) of lease {self.lease_id}, "
                f"must be within [0, {self.rows.num_layers})",
                lease_id=self.lease_id,
            )
        if not self._stops:
            self._stops = self._stretches()
        found: list[Placement] = []
        for target, source, count in head.runs:
            stop = target + count
            if stop > n or not count:
                raise TransportError(
                    f"a write to blocks {target}..{stop - 1} of lease {self.lease_id}, which has {n}",
                    lease_id=self.lease_id,
                    block_index=stop - 1,
                )
            while target < stop:
                length = min(stop, self._stops[target]) - target
                found.append((target, source, self._ids[target], length))
                target += length
                source += length
        return found

    def _stretches(self) -> list[int]:
        """For each block, where in the lease the stretch of neighbours that it is in ends."""
        ids, n = self._ids, len(self._ids)
        if ids and ids == list(range(ids[0], ids[0] + n)):
            return [n] * n
        stops: list[int] = []
        for position, length in runs(self.block_ids):
            stops += [position + length] * length
        return stops

    def account(self, targets: slice | Ids, layer_start: int, layer_stop: int, sums: Words) -> None:
        """Layers of blocks were placed; sums: uint64 [as many], what they add to each block's checksum."""
        self.sums[targets] += sums
        self.placed[layer_start:layer_stop, targets] = True
        self.num_placed += (layer_stop - layer_start) * len(sums)
        self.touch()

    def touch(self) -> None:
        """Bytes have come: the silence starts anew."""
        self.active_at = time.monotonic()

    def verify(self, head: CommitHead) -> None:
        """Raises TransportError if something is missing or was written twice, ChecksumMismatch if a block's bytes are
        not those that the sender summed. The sums here were made from the bytes in our pool after they were placed,
        so a torn read of shared memory or a fault on the way cannot pass."""
        n = len(self.block_ids)
        if len(head.sums) != n:
            raise TransportError(
                f"lease {self.lease_id} has {n} blocks, its commit names {len(head.sums)}", lease_id=self.lease_id
            )
        if not self.placed.all():
            layer, index = (int(x) for x in np.argwhere(~self.placed)[0])
            raise TransportError(
                f"lease {self.lease_id} is committed but layer {layer} of its block {index} was never written",
                lease_id=self.lease_id,
                block_index=index,
                layer=layer,
            )
        if self.num_placed != self.placed.size:
            raise TransportError(
                f"lease {self.lease_id}: {self.num_placed} layer blocks were written into {self.placed.size}, "
                "each must be written once",
                lease_id=self.lease_id,
            )
        if self.sums.tobytes() != head.sums.tobytes():
            differing = np.flatnonzero(self.sums != head.sums)
            index = int(differing[0])
            raise ChecksumMismatch(
                f"block {index} of lease {self.lease_id} arrived with other bytes than were sent "
                f"({differing.size} of {n} blocks differ)",
                lease_id=self.lease_id,
                block_index=index,
            )


class InboundLeases:
    """The receiver's open leases. Added and removed on the event loop, looked up by connection threads."""

    def __init__(self, rows: PoolShape) -> None:
        self._rows = rows
        self._leases: dict[int, InboundLease] = {}
        self._lock = threading.Lock()

    def add(self, lease: Lease) -> InboundLease:
        """Raises KVError for blocks that are not ours or named twice, or a lease_id that is open. That no block is in
        two leases is the book's business (kv/lease.py)."""
        ids = lease.block_ids
        if ids and not (min(ids) >= 1 and max(ids) < self._rows.num_blocks):
            raise KVError(f"lease {lease.lease_id} names a block outside 1..{self._rows.num_blocks - 1}")
        if len(set(ids)) != len(ids):
            raise KVError(f"lease {lease.lease_id} names a block twice", lease_id=lease.lease_id)
        with self._lock:
            if lease.lease_id in self._leases:
                raise KVError(f"lease {lease.lease_id} is open already", lease_id=lease.lease_id)
            inbound = InboundLease(lease.lease_id, lease.epoch, as_ids(ids), self._rows)
            self._leases[lease.lease_id] = inbound
            return inbound

    def get(self, lease_id: int) -> InboundLease | None:
        return self._leases.get(lease_id)

    def remove(self, lease: InboundLease) -> bool:
        """False if it was not open any more: somebody else ended it."""
        with self._lock:
            if self._leases.get(lease.lease_id) is not lease:
                return False
            del self._leases[lease.lease_id]
            return True

    def of(self, connection: object) -> list[InboundLease]:
        with self._lock:
            return [lease for lease in self._leases.values() if lease.connection is connection]

    def drain(self) -> list[InboundLease]:
        """Removes and returns all."""
        with self._lock:
            leases, self._leases = list(self._leases.values()), {}
            return leases

    def claim(self, lease_id: int, epoch: int, connection: object) -> InboundLease | DistServeError:
        """The lease, if this connection may write it: the first that asks is the only one. Otherwise why not."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.connection is connection and lease.epoch == epoch and not lease.fence.closed:
            return lease  # claimed before: nobody else can change that
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.epoch != epoch:
                return StaleEpoch(
                    f"lease {lease_id} is at epoch {lease.epoch}, not {epoch}",
                    lease_id=lease_id,
                    epoch=epoch,
                    current=lease.epoch,
                )
            if lease is None or lease.fence.closed:
                return LeaseRevoked(
                    f"lease {lease_id} (epoch {epoch}) is not open: committed, revoked or never granted",
                    lease_id=lease_id,
                    epoch=epoch,
                )
            if lease.connection is None:
                lease.connection = connection
            elif lease.connection is not connection:
                return TransportError(f"lease {lease_id} is being written by another connection", lease_id=lease_id)
            return lease
