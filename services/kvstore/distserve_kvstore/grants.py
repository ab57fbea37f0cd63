"""Offers: which blocks workers may write into the arena, under which leases, and what becomes of them.

The rows of a lease go one of three ways, once: to the index (committed), to the stale slots (it broke: fenced first),
or back to the arena (its writer is gone). An offer never waits: what finds no room is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distserve.errors import Draining, LeaseRevoked, Overloaded
from distserve.kv.hashing import unpack
from distserve.kv.layout import require_same
from distserve.kv.lease import LeaseTable
from distserve.messages import ChainRun, OfferGrant, OfferRequest
from distserve.transport.base import Commit, Lease, Receiver
from distserve.transport.select import Choice
from distserve.worker.in_use import InUse
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.offers import Owner, Piece, checked, pieces, require_short

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Offer:
    """One that is being written."""

    lease: Lease
    receiver: Receiver
    choice: Choice
    pieces: list[Piece]
    owner: Owner
    hashes: list[bytes]  # of lease.block_ids


class Grants:
    def __init__(
        self,
        holdings: Holdings,
        receivers: dict[str, Receiver],
        *,
        choose: Callable[..., Choice],
        in_use: InUse,
        ttl_s: float,
        max_leases: int,
        max_stale_slots: int,
        epoch: int = 1,
    ) -> None:
        """choose: transport/select.py's, as the node is configured."""
        self._holdings = holdings
        self._arena = holdings.arena
        self._receivers = receivers
        self._choose = choose
        self._in_use = in_use
        self._ttl_s = ttl_s
        self._max_leases = max_leases
        self._max_stale_slots = max_stale_slots
        self._leases = LeaseTable(epoch)
        self._open: dict[int, Offer] = {}  # by lease id
        self._incoming: set[bytes] = set()
        self._stale: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # hash -> row, until when; the oldest first
        self._fencing: dict[asyncio.Task[None], int] = {}  # -> rows
        self._none_open = asyncio.Event()
        self._none_open.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_stale(self) -> int:
        return len(self._stale)

    @property
    def num_blocks(self) -> int:
        """Rows of the arena that are held here."""
        return sum(len(o.lease.block_ids) for o in self._open.values()) + len(self._stale) + sum(self._fencing.values())

    # ------------------------------------------------------------ asking

    def grant(self, request: OfferRequest) -> OfferGrant:
        """Raises LayoutMismatch, TransportUnavailable, MalformedMessage, Overloaded, Draining."""
        require_same(self._arena.layout, request.layout)
        if self.draining:
            raise Draining("this store node is going away", retry_after_s=1.0)
        require_short(request.tenant, request.conversation)
        hashes = [unpack(checked(run)) for run in request.runs]
        flat = [h for run in hashes for h in run]
        owner = Owner(request.tenant, request.conversation, request.priority)
        wanted = self._wanted(request.runs, flat, owner)
        if not wanted:
            return OfferGrant(reason="all of it is here, or on its way")
        if len(self._open) >= self._max_leases:
            raise Overloaded(
                f"{len(self._open)} offers are under way here, the limit is {self._max_leases}", retry_after_s=1.0
            )
        choice = self._choose(
            [r.endpoint for r in self._receivers.values()],
            request.transports,
            request.host_key,
            num_bytes=len(wanted) * self._arena.block_bytes,
        )
        wanted, blocks = self._rows(wanted, flat)
        lease = self._leases.grant(request.worker, blocks, self._ttl_s, time.monotonic())
        receiver = self._receivers[choice.endpoint.kind]
        try:
            region = receiver.grant(lease)
        except BaseException:
            self._leases.revoke(lease.lease_id, lease.epoch)
            self._arena.free(blocks)
            raise
        names = [flat[i] for i in wanted]
        offer = Offer(lease, receiver, choice, pieces(request.runs, hashes, wanted, blocks), owner, names)
        self._incoming.update(names)
        self._open[lease.lease_id] = offer
        self._none_open.clear()
        return OfferGrant(wanted=wanted, region=region, ttl_s=self._ttl_s, reason=choice.reason)

    def _wanted(self, runs: Sequence[ChainRun], flat: list[bytes], owner: Owner) -> list[int]:
        """Numbers of the blocks that are neither here nor on their way. Whose the others are is noted."""
        seen: set[bytes] = set()
        wanted: list[int] = []
        first = 0
        for run in runs:
            here = self._holdings.is_here(run.hashes)
            if all(here):
                self._holdings.belongs(run.hashes, run.parent, run.start, owner, time.monotonic())
            for i, known in enumerate(here, first):
                if not known and flat[i] not in self._incoming and flat[i] not in seen:
                    wanted.append(i)
                seen.add(flat[i])
            first += len(here)
        return wanted

    def _rows(self, wanted: list[int], flat: list[bytes]) -> tuple[list[int], list[int]]:
        """As many of the wanted as there is room for, from the first on, and their rows: those kept for a retry, then
        free ones, then those kept for somebody else's."""
        kept = {i: row[0] for i in wanted if (row := self._stale.pop(flat[i], None)) is not None}
        fresh = len(wanted) - len(kept)
        free = self._holdings.make_room(fresh, around=b"".join(flat))
        while free < fresh and self._stale:
            self._drop_oldest_stale()
            free += 1
        short = max(0, fresh - free)
        if short:
            cut = [i for i in wanted if i not in kept][-short]
            for i in [i for i in kept if i >= cut]:
                self._arena.free([kept.pop(i)])
            wanted = [i for i in wanted if i < cut]
        if not wanted:
            raise Overloaded(
                f"no room: {self._arena.num_free} of {self._arena.num_blocks} blocks are free, the others "
                "are in use or not yet on disk",
                retry_after_s=1.0,
            )
        rows = iter(self._arena.allocate(len(wanted) - len(kept)))
        return wanted, [kept[i] if i in kept else next(rows) for i in wanted]

    # ------------------------------------------------------------ the ends of a lease

    def commit(self, commit: Commit) -> Offer:
        """All blocks of a lease have come and are right: they are the index's. Raises LeaseRevoked if they went another
        way meanwhile."""
        offer = self._open.get(commit.lease_id)
        if offer is None or offer.lease.epoch != commit.epoch:
            raise LeaseRevoked(f"lease {commit.lease_id} is not held any more", lease_id=commit.lease_id)
        self._leases.commit(commit.lease_id, commit.epoch)
        self._forget(offer)
        self._in_use.note(offer.lease.owner, offer.choice.endpoint.kind, offer.choice.reason)
        self._adopt(offer.pieces, offer.owner)
        return offer

    def _adopt(self, all_pieces: Sequence[Piece], owner: Owner) -> None:
        """The rows of each go to the index, or, where it refuses them, back to the arena: then its error is raised."""
        refused: Exception | None = None
        for piece in all_pieces:
            try:
                self._holdings.adopt(piece, owner, time.monotonic())
            except Exception as e:  # whatever it is, no row may be lost
                refused = e
                self._arena.free(piece.blocks)
        if refused is not None:
            raise refused

    def lost(self, lease_id: int, epoch: int, error: Exception) -> None:
        """The transport has fenced it already: its writer gave up, died, was cut off, or its bytes were wrong."""
        offer = self._open.get(lease_id)
        if offer is not None and offer.lease.epoch == epoch:
            log.info("offer %d of %s broke: %s", lease_id, offer.lease.owner, error)
            self._forget(offer)
            self._leases.revoke(lease_id, epoch)
            self._keep(offer)

    def release(self, worker: str, lease_id: int, epoch: int, reason: str) -> None:
        """Its holder gave it up. A stale epoch is ignored."""
        offer = self._open.get(lease_id)
        if offer is not None and offer.lease.epoch == epoch and offer.lease.owner == worker:
            self._revoke(offer, reason or "released", keep=True)

    def owner_gone(self, tenant: str, conversation: str) -> None:
        """Deleted, all of the tenant's without a conversation: what is being written must not bring it back."""
        for offer in list(self._open.values()):
            if offer.owner.is_of(tenant, conversation):
                self._revoke(offer, "its blocks were deleted", keep=False)

    def worker_gone(self, worker: str) -> None:
        """The registry says so: end its leases without waiting for them to expire."""
        for offer in [o for o in self._open.values() if o.lease.owner == worker]:
            self._revoke(offer, f"{worker} is gone", keep=False)

    def collect(self, now: float) -> None:
        """Revoke leases that were silent for their TTL; let go of slots that nobody came back for."""
        for offer in list(self._open.values()):
            idle = offer.receiver.idle_s(offer.lease.lease_id)
            if idle is not None and idle > offer.lease.ttl_s:
                self._revoke(offer, f"no byte for {idle:.1f} s", keep=True)
        while self._stale and next(iter(self._stale.values()))[1] < now:
            self._drop_oldest_stale()

    async def drain(self, grace_s: float) -> None:
        """Grant nothing new; returns when every lease has ended, or after grace_s."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._none_open.wait()
        except TimeoutError:
            log.warning("%d offers did not end in %.1f s", len(self._open), grace_s)

    async def close(self, timeout_s: float = 10.0) -> None:
        """End every lease; returns when all are fenced, or after timeout_s."""
        self.draining = True
        for offer in list(self._open.values()):
            self._revoke(offer, "draining", keep=False)
        if self._fencing:
            await asyncio.wait(set(self._fencing), timeout=timeout_s)
        while self._stale:
            self._drop_oldest_stale()

    def check(self) -> None:
        """Raises KVError unless leases and their rows are as they should be."""
        self._leases.check()

    def _revoke(self, offer: Offer, reason: str, *, keep: bool) -> None:
        """Fence, then let go of the rows. Forgotten now, so that a late commit finds nothing."""
        self._forget(offer)
        task = asyncio.create_task(self._fence(offer, reason, keep), name=f"fence {offer.lease.lease_id}")
        self._fencing[task] = len(offer.lease.block_ids)
        task.add_done_callback(lambda t: self._fencing.pop(t, None))

    async def _fence(self, offer: Offer, reason: str, keep: bool) -> None:
        lease = offer.lease
        await offer.receiver.revoke(lease.lease_id, lease.epoch)
        log.info("offer %d of %s ended: %s", lease.lease_id, lease.owner, reason)
        self._leases.revoke(lease.lease_id, lease.epoch)
        # From here on the rows are counted elsewhere; the task ends without another wait.
        task = asyncio.current_task()
        if task is not None:
            self._fencing.pop(task, None)
        if keep:
            self._keep(offer)
        else:
            self._arena.free(lease.block_ids)

    def _keep(self, offer: Offer) -> None:
        """As stale slots, so that the writer's retry finds room: at most max_stale_slots, the oldest go."""
        until = time.monotonic() + self._ttl_s
        for name, block in zip(offer.hashes, offer.lease.block_ids, strict=True):
            if name in self._stale or not self._max_stale_slots:
                self._arena.free([block])
                continue
            if len(self._stale) >= self._max_stale_slots:
                self._drop_oldest_stale()
            self._stale[name] = (block, until)

    def _drop_oldest_stale(self) -> None:
        _, (block, _) = self._stale.popitem(last=False)
        self._arena.free([block])

    def _forget(self, offer: Offer) -> None:
        del self._open[offer.lease.lease_id]
        self._incoming.difference_update(offer.hashes)
        if not self._open:
            self._none_open.set()
