"""A transfer out of a pool that the network card can't reach: by slots of the staging ring."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from distserve.errors import DistServeError
from distserve.messages import TrafficClass
from distserve.transport.base import Span
from distserve.transport.fence import Fence, post
from distserve.transport.rdma.pool_access import PoolAccess
from distserve.transport.rdma.reactor import Reactor
from distserve.transport.rdma.sources import Done, Writer
from distserve.transport.rdma.written import Written
from distserve.transport.spans import as_ids
from distserve.transport.staging_ring import Staged, StagingRing


@dataclass(slots=True, eq=False)
class _Attempt:
    """What is staged for one link. Its fence is round the pool's blocks: shut, no copy for this link reads them."""

    fence: Fence = field(default_factory=Fence)
    num_pieces: int = 0  # submitted, not yet handed to the link
    held: set[Staged] = field(default_factory=set)  # slots that the device reads, or soon will


class StagedSource:
    """Nothing is staged before the receiver has said where to write, so that who has to wait holds no slot. A slot goes
    back once its last write has completed, or can't be under way any more. On a new link everything is staged again:
    what is in the slots is gone, and the pool's blocks are kept until the commit is acknowledged.
    """

    def __init__(self, writer: Writer, access: PoolAccess, reactor: Reactor, loop: asyncio.AbstractEventLoop) -> None:
        assert access.ring is not None
        self._writer = writer
        self._access = access
        self._ring: StagingRing = access.ring
        self._reactor = reactor
        self._loop = loop
        self._written: list[Written] = []
        self._attempt: _Attempt | None = None
        self._fences: list[Fence] = []  # of every attempt
        self._tasks: set[asyncio.Task[None]] = set()

    def mark(self) -> object:
        return self._access.mark()

    def add(self, written: Written) -> None:
        self._written.append(written)
        if self._attempt is not None:
            self._stage(self._attempt, written)

    def begin(self) -> None:
        self.detach()
        self._writer.sums[:] = 0  # they come again with the pieces
        self._attempt = _Attempt()
        self._fences.append(self._attempt.fence)
        for written in self._written:
            self._stage(self._attempt, written)

    def detach(self) -> None:
        self.cease()
        self._give_slots_back()
        self._attempt = None

    @property
    def is_busy(self) -> bool:
        return self._attempt is None or bool(self._attempt.num_pieces)

    def cease(self) -> None:
        if self._attempt is not None:
            self._attempt.fence.close()

    def let_go(self) -> None:
        self._give_slots_back()
        self._written.clear()

    def when_unread(self, done: Done) -> None:
        post(self._loop, self._shut, done)

    def abandon(self, done: Done) -> None:
        for fence in self._fences:
            fence.close()
        self._shut(done)

    def _shut(self, done: Done) -> None:
        """On the loop."""

        async def shut() -> None:
            for fence in self._fences:
                await fence.shut()  # for as long as the device takes: the blocks must not be given to others before
            done()

        task = self._loop.create_task(shut(), name=f"staging of lease {self._writer.lease_id} ends")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- pieces

    def _stage(self, attempt: _Attempt, written: Written) -> None:
        sources, targets = tuple(written.sources.tolist()), tuple(written.targets.tolist())
        span = Span(written.layer_start, written.layer_stop, sources, targets)
        sink = _Sink(self, attempt, written.traffic_class)
        attempt.num_pieces += self._ring.submit([span], attempt.fence, sink, written.after)

    def staged(self, attempt: _Attempt, traffic_class: TrafficClass, staged: Staged) -> None:
        if attempt is not self._attempt or self._writer.is_over:
            staged.release()
            return
        attempt.num_pieces -= 1
        piece = staged.piece
        written = Written(
            piece.layer_start, piece.layer_stop, as_ids(piece.source_blocks), as_ids(piece.targets), traffic_class
        )
        np.add.at(self._writer.sums, written.targets, staged.sums)
        attempt.held.add(staged)
        here = staged.address + staged.row_bytes * np.arange(len(piece.source_blocks))
        try:
            self._writer.post(written, here, lambda: _left(attempt, staged))
        except DistServeError as e:
            self._writer.withdraw(e, e.message, e)
            return
        if not attempt.num_pieces:
            self._writer.read_on()

    def failed(self, attempt: _Attempt, error: DistServeError) -> None:
        if attempt is self._attempt:
            self._writer.withdraw(error, error.message, error)

    def _give_slots_back(self) -> None:
        if self._attempt is not None:
            for staged in self._attempt.held:
                staged.release()
            self._attempt.held.clear()


@dataclass(frozen=True, slots=True)
class _Sink:
    """staging_ring.Sink: on the ring's thread, on to the reactor's."""

    source: StagedSource
    attempt: _Attempt
    traffic_class: TrafficClass

    def staged(self, staged: Staged) -> None:
        if not self.source._reactor.call(lambda: self.source.staged(self.attempt, self.traffic_class, staged)):
            staged.release()

    def failed(self, error: DistServeError) -> None:
        self.source._reactor.call(lambda: self.source.failed(self.attempt, error))


def _left(attempt: _Attempt, staged: Staged) -> None:
    """Its writes have completed."""
    attempt.held.discard(staged)
    staged.release()
