"""Where a lease's bytes land: in its own blocks, or in blocks of the landing that stand for them until it is whole."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from distserve.errors import TransportError
from distserve.transport.inbound import InboundLease
from distserve.transport.landing import Landing
from distserve.transport.rdma.reactor import Reactor
from distserve.transport.spans import Ids, as_ids

log = logging.getLogger(__name__)

Ready = Callable[["Place"], object]


class Place(Protocol):
    """One lease's, on one link. `ids`: the blocks that the peer writes, in the order of the lease's."""

    ids: Ids

    def take(self) -> Ids:
        """They are the caller's from here on."""

    def leave(self) -> None:
        """Nothing is written there any more, or nothing ever was. Idempotent."""


class Room(Protocol):
    """For the reactor's thread."""

    def ask(self, lease: InboundLease, ready: Ready) -> Place:
        """`ready` is called once there is a place, perhaps before this returns; never if it was left before. Raises
        TransportError if there can never be one."""


class _OwnBlocks:
    def __init__(self, ids: Ids) -> None:
        self.ids = ids

    def take(self) -> Ids:
        return self.ids

    def leave(self) -> None: ...


class PoolRoom:
    """The pool that is granted from is the one that peers write."""

    def ask(self, lease: InboundLease, ready: Ready) -> Place:
        place = _OwnBlocks(lease.block_ids)
        ready(place)
        return place


class _Berth:
    """In a LandingRoom: waits, or has blocks, or neither any more."""

    def __init__(self, landing: Landing, count: int, ready: Ready) -> None:
        self.ids = as_ids(())
        self.count = count
        self.ready = ready
        self.has_left = False
        self._landing = landing

    def take(self) -> Ids:
        ids, self.ids = self.ids, as_ids(())
        self.has_left = True
        return ids

    def leave(self) -> None:
        ids = self.take()
        if len(ids):
            self._landing.release(tuple(ids.tolist()))


class LandingRoom:
    """Leases that find no room in the landing wait in order: their peers are told where to write only then. So the
    landing bounds what is on its way, and nobody blocks. A lease that was granted and is not being written holds
    nothing."""

    def __init__(self, landing: Landing, reactor: Reactor) -> None:
        self._landing = landing
        self._waiting: deque[_Berth] = deque()
        landing.on_room(lambda: reactor.call(self._serve))

    @property
    def num_waiting(self) -> int:
        return sum(not berth.has_left for berth in self._waiting)

    def ask(self, lease: InboundLease, ready: Ready) -> Place:
        count = len(lease.block_ids)
        if count > self._landing.num_blocks:
            raise TransportError(
                f"lease {lease.lease_id} has {count} blocks, the staging memory that it must land in has "
                f"{self._landing.num_blocks}: raise landing_bytes",
                lease_id=lease.lease_id,
                key="landing_bytes",
                value=self._landing.num_blocks,
                expected=f">= {count} blocks",
            )
        berth = _Berth(self._landing, count, ready)
        self._waiting.append(berth)
        self._serve()
        return berth

    def _serve(self) -> None:
        while self._waiting:
            berth = self._waiting[0]
            if not berth.has_left:
                if berth.count > self._landing.num_free:
                    return
                berth.ids = as_ids(self._landing.reserve(berth.count))
            self._waiting.popleft()
            if not berth.has_left:
                try:
                    berth.ready(berth)
                except Exception:  # the others wait too
                    log.exception("a lease that has room now could not be opened")
