"""Room for sequences that prefill workers are computing: who holds which blocks under which lease.

A lease's blocks go one of three ways, once: to the adopted sequence (committed), back to the pool after the fence
(revoked, lost, expired), or on from one to the other never. Requests that find no room wait in order
(lease_queue.py).

What the pool holds of a prompt's beginning is not leased: nobody writes to it. The reservation has a reference to each
of those blocks, which goes the way of the lease's.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal

from distserve.errors import Cancelled, DistServeError, Draining, InvalidRequest, LeaseRevoked, Overloaded, WorkerLost
from distserve.kv.block_pool import BlockPool
from distserve.kv.layout import block_bytes, require_same
from distserve.kv.lease import LeaseTable
from distserve.messages import KVLayout, LeaseGrant, LeaseRequest, SequenceKey
from distserve.telemetry import current, stage
from distserve.transport.base import Commit, Receiver
from distserve.transport.select import Choice
from distserve.worker.in_use import InUse
from distserve_decode.beside import Alone, Beside
from distserve_decode.lease_queue import LeaseQueue
from distserve_decode.reservation import Ask, Reservation, Waiter, blocks_and_names

log = logging.getLogger(__name__)


class Reservations:
    def __init__(
        self,
        pool: BlockPool,
        leases: LeaseTable,
        receivers: dict[str, Receiver],
        layout: KVLayout,
        *,
        choose: Callable[..., Choice],
        in_use: InUse | None = None,
        growth_blocks: int,
        ttl_s: float,
        may_grant: Callable[[], bool],
        on_freed: Callable[[], None],
        beside: Beside | None = None,
        policy: Literal["slo", "fcfs"] = "slo",
        max_waiting: int = 256,
    ) -> None:
        """`choose(offered, kinds, host_key, num_bytes=...)`: the endpoint for an asker that can write by `kinds` from
        its host, and why; `in_use` is told of those that are committed, since a grant may never be used.
        `growth_blocks`: that a lease holds beyond the prompt. `may_grant()`: there is a seat for one more sequence.
        `on_freed()`: a lease's blocks are back in the pool, or one waits less for some. `policy`: of those that wait,
        of whom there may be `max_waiting`."""
        self._pool = pool
        self._leases = leases
        self._receivers = receivers
        self._layout = layout
        self._choose = choose
        self._in_use = in_use or InUse()
        self._growth_blocks = growth_blocks
        self._ttl_s = ttl_s
        self._may_grant = may_grant
        self._on_freed = on_freed
        self._beside = beside or Alone()
        self._max_waiting = max_waiting
        self._granted: dict[int, Reservation] = {}  # by lease id
        self._by_key: dict[SequenceKey, Reservation] = {}
        self._waiting = LeaseQueue(by_class=policy == "slo")
        self._fencing: set[asyncio.Task[None]] = set()
        self._none_granted = asyncio.Event()
        self._none_granted.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._granted) + len(self._waiting) + len(self._fencing)

    @property
    def num_granted(self) -> int:
        return len(self._granted)

    @property
    def num_growth_blocks(self) -> int:
        """That those are expected to take beyond what they hold."""
        return sum(r.num_growth_blocks for r in self._granted.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def first_waiting(self) -> LeaseRequest | None:
        """The next to be granted."""
        head = self._waiting.head
        return None if head is None else head.request

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._by_key or any(w.request.key == key for w in self._waiting)

    async def grant(self, request: LeaseRequest) -> LeaseGrant:
        """Blocks for the prompt and its first growth, waiting for up to wait_s for them.

        Raises LayoutMismatch, TransportUnavailable, InvalidRequest (never fits), Overloaded, Draining, Cancelled.
        """
        require_same(self._layout, request.layout)
        blocks, names = blocks_and_names(request, self._layout.block_size)
        choice = self._choose(
            [r.endpoint for r in self._receivers.values()],
            request.transports,
            request.host_key,
            num_bytes=(blocks - len(self._pool.find(names))) * block_bytes(self._layout),
        )
        if blocks > self._pool.num_total:
            raise InvalidRequest(
                f"num_tokens is {request.num_tokens}: {blocks} KV blocks; this decode worker has "
                f"{self._pool.num_total}: raise kv.num_blocks",
                param="num_tokens",
            )
        if self.draining:
            raise Draining("this decode worker is going away", retry_after_s=1.0)
        ask = Ask(request, blocks, names, choice, current())
        if len(self._waiting) or (grant := self._take(ask)) is None:
            return await self._wait_for_room(ask)
        return grant

    def _growth(self, blocks: int) -> int:
        """Room for the first output: less than asked for where the whole pool is hardly more than the prompt."""
        return min(self._growth_blocks, self._pool.num_total - blocks)

    async def _wait_for_room(self, ask: Ask) -> LeaseGrant:
        request = ask.request
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} hand-overs wait for room, the limit is {self._max_waiting}", retry_after_s=1.0
            )
        waiter = Waiter(ask, asyncio.get_running_loop().create_future())
        self._waiting.add(waiter)
        if len(self._waiting) > 1:
            self.room_changed()  # it may go before the others
        try:
            await asyncio.wait({waiter.granted}, timeout=request.wait_s)
            if waiter.granted.done():
                return waiter.granted.result()
            raise Overloaded(
                f"no room for {ask.blocks} KV blocks within {request.wait_s} s ({self._pool.num_available} of "
                f"{self._pool.num_total} free)",
                retry_after_s=1.0,
            )
        except asyncio.CancelledError:
            self.cancel(request.key)
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self.room_changed()  # the next one may be smaller
                self._on_freed()

    def _take(self, ask: Ask) -> LeaseGrant | None:
        """None, and nothing is taken, if there is no room."""
        if not self._may_grant():
            return None
        request, growth = ask.request, self._growth(ask.blocks)
        more_growth = max(0, self._beside.growth(request) - growth)
        if (spare := self._beside.spare(request, more_growth)) is None:
            return None
        hits = self._pool.find(ask.names)
        self._pool.acquire(hits)  # before the room is counted: they are not part of it
        num_leased = ask.blocks - len(hits)
        if self._pool.num_available < num_leased + growth + spare:
            self._pool.free(hits)
            return None
        taken = self._pool.allocate(num_leased + growth)
        lease = self._leases.grant(request.prefill_worker, taken[:num_leased], self._ttl_s, time.monotonic())
        receiver = self._receivers[ask.choice.endpoint.kind]
        reservation = Reservation(
            request.key, lease, hits + taken, ask.names[: len(hits)], receiver, ask.choice, more_growth, asker=ask.asker
        )
        self._granted[lease.lease_id] = self._by_key[request.key] = reservation
        self._none_granted.clear()
        self._beside.granted()
        return LeaseGrant(
            region=receiver.grant(lease), ttl_s=self._ttl_s, num_hit_blocks=len(hits), reason=ask.choice.reason
        )

    def room_changed(self) -> None:
        """Blocks or seats came back, or somebody to wait for them: grant in order, for as long as the next one fits."""
        while not self.draining and (waiter := self._waiting.head) is not None:
            if waiter.granted.done():
                self._waiting.remove(waiter)
                continue
            if (grant := self._take(waiter.ask)) is None:
                return
            self._waiting.granted(waiter)
            waiter.granted.set_result(grant)
            self._on_freed()

    # ------------------------------------------------------------ the ends of a lease

    def commit(self, commit: Commit) -> Reservation:
        """A verified commit came: the blocks leave this table for the sequence. Raises LeaseRevoked if they went
        another way meanwhile."""
        reservation = self._granted.get(commit.lease_id)
        if reservation is None or reservation.lease.epoch != commit.epoch:
            raise LeaseRevoked(f"lease {commit.lease_id} is not held any more", lease_id=commit.lease_id)
        self._leases.commit(commit.lease_id, commit.epoch)
        choice = reservation.choice
        self._in_use.note(reservation.lease.owner, choice.endpoint.kind, choice.reason)
        self._forget(reservation)
        return reservation

    def lost(self, lease_id: int, epoch: int, error: Exception) -> None:
        """The transport has fenced it already: sender dead, cut off or its bytes wrong. Not so a later lease of the
        same slot, which the epoch tells apart."""
        reservation = self._granted.get(lease_id)
        if reservation is not None and reservation.lease.epoch == epoch:
            log.warning("lease %d of %s lost: %s", lease_id, reservation.key, error)
            stage("lease lost", reservation.asker, reservation.granted_at, error=error)
            self._give_back(reservation)

    def release(self, lease_id: int, epoch: int, reason: str) -> None:
        """Its holder gave it up. A stale epoch is ignored."""
        reservation = self._granted.get(lease_id)
        if reservation is not None and reservation.lease.epoch == epoch:
            self._revoke(reservation, reason)

    def cancel(self, key: SequenceKey, error: DistServeError | None = None) -> bool:
        """End whatever this table holds for a sequence; False if it holds nothing."""
        found = False
        for waiter in self._waiting:
            if waiter.request.key == key and not waiter.granted.done():
                waiter.granted.set_exception(error or Cancelled("the sequence was cancelled"))
                found = True
        if (reservation := self._by_key.get(key)) is not None:
            self._revoke(reservation, "cancelled")
            found = True
        return found

    def worker_gone(self, prefill_worker: str) -> None:
        """The registry says so: end its leases without waiting for them to expire. (It may live and merely have been
        silent: then it asks again.)"""
        for reservation in list(self._granted.values()):
            if reservation.lease.owner == prefill_worker:
                self._revoke(reservation, f"prefill worker {prefill_worker} is gone")
        for waiter in self._waiting:
            if waiter.request.prefill_worker == prefill_worker and not waiter.granted.done():
                waiter.granted.set_exception(
                    WorkerLost(f"prefill worker {prefill_worker} is gone", worker=prefill_worker, role="prefill")
                )

    def expire(self) -> None:
        """Revoke leases that have been silent for their TTL."""
        for reservation in list(self._granted.values()):
            idle = reservation.receiver.idle_s(reservation.lease.lease_id)
            if idle is not None and idle > reservation.lease.ttl_s:
                log.warning("lease %d of %s expired after %.1f s", reservation.lease.lease_id, reservation.key, idle)
                expired = LeaseRevoked(f"no byte came for {idle:.1f} s", lease_id=reservation.lease.lease_id)
                stage("lease lost", reservation.asker, reservation.granted_at, error=expired)
                self._revoke(reservation, "expired")

    async def drain(self, grace_s: float) -> None:
        """Grant nothing new, also to those that wait; returns when every granted lease has come to an end, or after
        grace_s."""
        self.draining = True
        for waiter in self._waiting:
            if not waiter.granted.done():
                waiter.granted.set_exception(Draining("this decode worker is going away", retry_after_s=1.0))
        try:
            async with asyncio.timeout(grace_s):
                await self._none_granted.wait()
        except TimeoutError:
            log.warning("%d hand-overs did not end in %.1f s", len(self._granted), grace_s)

    async def close(self, timeout_s: float = 10.0) -> None:
        """End every lease; returns when all are fenced, or after timeout_s."""
        await self.drain(0)
        for reservation in list(self._granted.values()):
            self._revoke(reservation, "draining")
        if self._fencing:
            await asyncio.wait(set(self._fencing), timeout=timeout_s)

    def _revoke(self, reservation: Reservation, reason: str) -> None:
        """Fence, then give the blocks back. The table forgets it now, so that a late commit finds nothing."""
        self._forget(reservation)
        task = asyncio.create_task(self._fence(reservation, reason), name=f"fence {reservation.lease.lease_id}")
        self._fencing.add(task)
        task.add_done_callback(self._fencing.discard)

    async def _fence(self, reservation: Reservation, reason: str) -> None:
        await reservation.receiver.revoke(reservation.lease.lease_id, reservation.lease.epoch)
        self._leases.revoke(reservation.lease.lease_id, reservation.lease.epoch)
        self._pool.free(reservation.blocks)
        log.debug("lease %d of %s ended: %s", reservation.lease.lease_id, reservation.key, reason)
        self._on_freed()
        self.room_changed()

    def _give_back(self, reservation: Reservation) -> None:
        self._forget(reservation)
        self._leases.revoke(reservation.lease.lease_id, reservation.lease.epoch)
        self._pool.free(reservation.blocks)
        self._on_freed()
        self.room_changed()

    def _forget(self, reservation: Reservation) -> None:
        del self._granted[reservation.lease.lease_id]
        if self._by_key.get(reservation.key) is reservation:
            del self._by_key[reservation.key]
        if not self._granted:
            self._none_granted.set()
