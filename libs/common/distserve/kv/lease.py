"""Who may write which blocks, for how long. The decode side's book: no clock, no I/O; times are passed in (seconds of
one monotonic clock)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from distserve.errors import KVError, LeaseRevoked, StaleEpoch


@dataclass(slots=True)
class Lease:
    """The owner's side of a grant: who may write which blocks, for how long (seconds of silence)."""

    lease_id: int
    epoch: int
    block_ids: list[int]
    ttl_s: float
    owner: str = ""  # who asked, for messages


@dataclass(slots=True)
class _Slot:
    lease: Lease
    active_at: float


def first_epoch() -> int:
    """An epoch above any that an earlier process on this host can have used: the wall clock in microseconds."""
    return time.time_ns() // 1000


class LeaseTable:
    """Open leases by slot. grant() opens one; commit() or revoke() ends it, once.

    A lease_id is a slot's number and is used again; the epoch is not: every grant gets a higher one than any before
    it, so (lease_id, epoch) names one lease for ever, also across restarts if the first epoch comes from
    first_epoch(). Blocks belong to the lease from grant() until commit() or revoke() hands them back to the caller.
    A slot must be ended only after the transport is fenced: from then on it is given to others.
    """

    def __init__(self, epoch: int = 1) -> None:
        self._next_epoch = epoch
        self._open: dict[int, _Slot] = {}
        self._vacant: list[int] = []
        self._blocks: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_blocks(self) -> int:
        """Blocks held by open leases."""
        return len(self._blocks)

    def grant(self, owner: str, block_ids: list[int], ttl_s: float, now: float) -> Lease:
        """Opens a lease. Raises KVError if a block is leased already or named twice, or ttl_s is not positive."""
        if ttl_s <= 0:
            raise KVError(f"ttl_s is {ttl_s}, must be above 0", ttl_s=ttl_s, expected=">0")
        wanted = set(block_ids)
        if len(wanted) != len(block_ids):
            raise KVError("a block is named twice in one lease", num_blocks=len(block_ids), num_distinct=len(wanted))
        if taken := wanted & self._blocks:
            raise KVError(f"block {min(taken)} is in another open lease", block_id=min(taken))
        lease_id = self._vacant.pop() if self._vacant else len(self._open) + 1
        lease = Lease(lease_id, self._next_epoch, list(block_ids), ttl_s, owner)
        self._next_epoch += 1
        self._open[lease_id] = _Slot(lease, now)
        self._blocks |= wanted
        return lease

    def get(self, lease_id: int, epoch: int) -> Lease:
        """The open lease. Raises LeaseRevoked (none in that slot) or StaleEpoch (another one is)."""
        return self._slot(lease_id, epoch).lease

    def touch(self, lease_id: int, epoch: int, at: float) -> None:
        """Its writer made progress at `at`: the silence counts from there. Never moves back."""
        slot = self._slot(lease_id, epoch)
        slot.active_at = max(slot.active_at, at)

    def expired(self, now: float) -> list[Lease]:
        """Open leases that were silent for longer than their ttl_s. They stay open until revoked."""
        return [slot.lease for slot in self._open.values() if now - slot.active_at > slot.lease.ttl_s]

    def commit(self, lease_id: int, epoch: int) -> Lease:
        """Ends a lease whose blocks have all come; they now belong to the caller."""
        return self._end(lease_id, epoch)

    def revoke(self, lease_id: int, epoch: int) -> Lease | None:
        """Ends a lease that failed; the blocks go back to the caller to be freed. None if it has ended before."""
        try:
            return self._end(lease_id, epoch)
        except (LeaseRevoked, StaleEpoch):
            return None

    def check(self) -> None:
        """Raises KVError unless every slot is open or vacant and every block is in one lease."""
        num_slots = len(self._open) + len(self._vacant)
        if set(self._open) | set(self._vacant) != set(range(1, num_slots + 1)):
            raise KVError("a lease slot is lost or both open and vacant", num_slots=num_slots)
        counted = sum(len(slot.lease.block_ids) for slot in self._open.values())
        if counted != len(self._blocks):
            raise KVError(f"{counted} blocks in open leases, {len(self._blocks)} on the books", counted=counted)

    def _slot(self, lease_id: int, epoch: int) -> _Slot:
        slot = self._open.get(lease_id)
        if slot is None:
            raise LeaseRevoked(f"lease {lease_id} is not open", lease_id=lease_id, epoch=epoch)
        if slot.lease.epoch != epoch:
            raise StaleEpoch(
                f"lease {lease_id} is at epoch {slot.lease.epoch}, not {epoch}",
                lease_id=lease_id,
                epoch=epoch,
                current=slot.lease.epoch,
            )
        return slot

    def _end(self, lease_id: int, epoch: int) -> Lease:
        lease = self._slot(lease_id, epoch).lease
        del self._open[lease_id]
        self._vacant.append(lease_id)
        self._blocks.difference_update(lease.block_ids)
        return lease
