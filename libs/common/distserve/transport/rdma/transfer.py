"""One lease being written over rdma."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from distserve.errors import Cancelled, DistServeError, LeaseRevoked, PeerLost, TransportError
from distserve.kv.checksum import Words
from distserve.messages import RemoteRegion, TrafficClass
from distserve.transport.base import Span, Transfer, TransferFacts
from distserve.transport.facts import Course
from distserve.transport.fence import post
from distserve.transport.outbound import fresh
from distserve.transport.rdma.connect import bytes_by_class
from distserve.transport.rdma.frames import Opened
from distserve.transport.rdma.reactor import Reactor
from distserve.transport.rdma.sources import Done, Source
from distserve.transport.rdma.targets import Targets
from distserve.transport.rdma.written import Coverage, Written
from distserve.transport.rows import PoolShape
from distserve.transport.spans import Ids, as_ids, check_span

if TYPE_CHECKING:
    from distserve.transport.rdma.sender_link import SenderLink

Outcome: TypeAlias = "int | DistServeError"  # bytes moved, or why not


class RdmaTransfer(Transfer):
    """Made by its sender. write() is for any thread, commit() and abort() for the sender's loop; what the reactor's
    thread does is told so. Links come and go under a transfer: it fails only when its lease does, or when no link
    could be had for peer_timeout_s.

    Our blocks are read by the device, or by copies to memory that the device reads: that is the source's part
    (sources.py). A commit() that has returned, and one or an abort() that has raised or returned, has seen every write
    completed or its queue pair destroyed, and every such copy over.
    """

    def __init__(
        self,
        region: RemoteRegion,
        shape: PoolShape,
        traffic_class: TrafficClass,
        reactor: Reactor,
        *,
        source: Callable[[RdmaTransfer], Source],
        abort_timeout_s: float,
        on_end: Callable[[RdmaTransfer], None],
        on_moved: Callable[[dict[TrafficClass, int], float], None],
        course: Course,
    ) -> None:
        """on_moved: told the bytes by the class they went in and the seconds since now, if it is adopted. course: the
        reactor's thread goes on with it."""
        self.lease_id, self.epoch = region.lease_id, region.epoch
        self.num_blocks = len(region.block_ids)
        self.traffic_class: TrafficClass = traffic_class
        self.sums: Words = np.zeros(self.num_blocks, np.uint64)  # the reactor's, as all down to `progress_at`
        self.link: SenderLink | None = None
        self.opened: Opened | None = None
        self.used: dict[int, int] = {}  # lanes of this link that carried blocks, and bytes
        self.state: bytes | None = None  # to be committed
        self.is_over = False  # nothing more is posted
        self.progress_at = 0.0
        self._coverage = Coverage(shape.num_layers, self.num_blocks, self.lease_id)
        self._targets: Targets | None = None  # of this link, once it is open on it
        self._shape = shape
        self._reactor = reactor
        self._abort_timeout_s = abort_timeout_s
        self._on_end = on_end
        self._on_moved = on_moved
        self._opened_at = time.monotonic()
        self._facts = course.facts  # the loop's
        self._course = course
        self._loop = asyncio.get_running_loop()
        self._ending = False
        self._moved: dict[int, int] = {}
        self._failure: DistServeError | None = None
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._release: asyncio.Task[None] | None = None
        self._source = source(self)

    @property
    def failure(self) -> DistServeError | None:
        return self._failure

    @property
    def facts(self) -> TransferFacts:
        return self._facts

    # -- Transfer

    def write(self, spans: Sequence[Span], *, awaited: bool = False) -> None:
        """Raises KVError for a span that no receiver could take: layers or blocks that do not exist."""
        if self._failure is not None:
            return  # commit() says it
        if self._ending:
            raise TransportError(
                f"lease {self.lease_id} is committed, nothing more may be written", lease_id=self.lease_id
            )
        for span in spans:
            check_span(span, self._shape.num_layers, self._shape.num_blocks, self.num_blocks)
        given, after = tuple(spans), self._source.mark()
        self._tell(lambda: self._take(given, awaited, after))

    async def commit(self, state: bytes, *, timeout_s: float) -> int:
        """A commit that raises PeerLost may have been adopted all the same, if the receiver was lost before its answer
        came: sequences carry an attempt number for that reason."""
        if self._ending:
            raise fresh(
                self._failure
                or TransportError(f"lease {self.lease_id} was committed or aborted before", lease_id=self.lease_id)
            )
        self._ending = True
        self._tell(lambda: self._commit(state))
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await asyncio.shield(self._outcome)
        except TimeoutError:
            error = PeerLost(
                f"lease {self.lease_id} was not acknowledged within {timeout_s} s",
                lease_id=self.lease_id,
                timeout_s=timeout_s,
            )
            await self._give_up(error, f"not acknowledged within {timeout_s} s")
            outcome = self._outcome.result()
        except asyncio.CancelledError:
            cancelled = Cancelled(f"the commit of lease {self.lease_id} was cancelled", lease_id=self.lease_id)
            await self._give_up(cancelled, "the commit was cancelled")
            raise
        if isinstance(outcome, DistServeError):
            raise fresh(outcome)
        self._on_moved(bytes_by_class(self._moved), time.monotonic() - self._opened_at)
        return outcome

    async def abort(self, reason: str) -> None:
        if self._outcome.done() and not isinstance(self._outcome.result(), DistServeError):
            return  # committed
        error = LeaseRevoked(f"lease {self.lease_id} was aborted: {reason}", lease_id=self.lease_id, reason=reason)
        self._failure = self._failure or error  # first: a write() that sees the end must see why
        self._ending = True
        await self._give_up(error, reason)

    async def _give_up(self, error: DistServeError, reason: str) -> None:
        """Ends the transfer, unless it has ended; returns when our blocks are read no more. Any number of callers wait
        for one and the same ending."""
        if self._release is None:
            self._failure = self._failure or error
            self._release = asyncio.create_task(self._withdraw(error, reason))
        await asyncio.shield(self._release)

    async def _withdraw(self, error: DistServeError, reason: str) -> None:
        self._tell(lambda: self.withdraw(error, reason))
        try:
            async with asyncio.timeout(self._abort_timeout_s):
                await asyncio.shield(self._outcome)
        except TimeoutError:
            self._tell(lambda: self._cut(error))
            await asyncio.shield(self._outcome)

    def _tell(self, run: Callable[[], object]) -> None:
        """Runs it on the reactor's thread. If that has ended, with its devices closed, so has the transfer."""
        if not self._reactor.call(run):
            self.crashed(PeerLost("the rdma devices of this host are closed"))

    def crashed(self, error: DistServeError) -> None:
        """The reactor's thread has ended. For any thread."""
        post(self._loop, self._source.abandon, lambda: self.settle(error))

    def settle(self, outcome: Outcome, facts: TransferFacts | None = None) -> None:
        """On the loop, once our blocks are read no more. The first outcome counts."""
        if facts is not None and not self._outcome.done():
            self._facts = facts
        if isinstance(outcome, DistServeError):
            self._failure = self._failure or outcome
        if not self._outcome.done():
            self._outcome.set_result(outcome)
            self._on_end(self)

    # -- on the reactor's thread

    def _take(self, spans: Sequence[Span], awaited: bool, after: object) -> None:
        if self.is_over:
            return
        traffic_class: TrafficClass = "decode" if awaited and self.traffic_class == "prefill" else self.traffic_class
        for span in spans:
            if not span.targets:
                continue
            sources, targets = as_ids(span.source_blocks), as_ids(span.targets)
            written = Written(span.layer_start, span.layer_stop, sources, targets, traffic_class, after)
            self._coverage.add(written)
            try:
                self._source.add(written)
            except TransportError as e:
                self.withdraw(e, e.message, e)
                return

    @property
    def is_open(self) -> bool:
        return self._targets is not None

    def post(self, written: Written, here: Ids, done: Done | None = None) -> None:
        """As Writer.post."""
        assert self.link is not None
        assert self._targets is not None
        by_lane = list(self._targets.writes(written, here))
        left = len(by_lane)

        def lane_done() -> None:
            nonlocal left
            left -= 1
            self._course.end()
            if not left and done is not None:
                done()

        for lane, num_bytes, writes in by_lane:
            self.used[lane] = self.used.get(lane, 0) + num_bytes
            self._course.begin()
            self.link.write(self, lane, writes, lane_done)

    def read_on(self) -> None:
        """What the source was busy with is posted and summed."""
        if not self.is_over:
            self._finish()

    def _commit(self, state: bytes) -> None:
        if self.is_over:
            return
        self.state = state
        self._finish()

    def attach(self, link: SenderLink) -> None:
        if self.is_over:
            if self.link is None:
                self.end(self._failure or PeerLost(f"lease {self.lease_id} has ended"))
        elif self.link is not link and link.error is None:
            self.link = link
            link.open(self)

    def on_opened(self, opened: Opened) -> None:
        """The receiver has bound what this link needs: write everything that is final."""
        assert self.link is not None
        self._course.may_move()
        self.opened = opened
        self._targets = Targets(opened, self._shape, self.num_blocks, self.link.num_rails, self.link.stripe_blocks)
        self._source.begin()
        self._finish()

    def on_detached(self) -> None:
        """The link is gone, and with it everything that was under way."""
        self._course.stop()
        self.link = None
        self.opened = self._targets = None
        self.used.clear()
        self._source.detach()

    def cease(self) -> None:
        """Nothing more is posted for it."""
        self.is_over = True
        self._source.cease()

    def on_idle(self) -> None:
        """It is over, and nothing of it is under way any more."""
        self._source.let_go()

    def withdraw(self, error: DistServeError, reason: str, cause: DistServeError | None = None) -> None:
        """Give the lease up; cause: what was wrong with it on our side."""
        if self.is_over:
            return
        self.cease()
        if self.link is None:
            self.end(error)
        else:
            self.link.abort(self, error, reason, cause)

    def end(self, outcome: Outcome) -> None:
        """Nothing of ours is under way any more."""
        self.cease()
        self.link = None
        facts = self._course.ended(outcome if isinstance(outcome, int) else 0)
        self._source.let_go()
        self._source.when_unread(lambda: post(self._loop, self.settle, outcome, facts))

    def on_lost(self, error: DistServeError) -> None:
        """The receiver says that the lease is dead. What is under way is waited for before the end is told."""
        self.cease()
        self._failure = self._failure or error

    def give_up(self, error: DistServeError) -> None:
        """On the loop: no link is to be had."""

        def give_up() -> None:
            if self.link is None and not self.is_over:
                self.end(error)

        self._tell(give_up)

    def _cut(self, error: DistServeError) -> None:
        """The receiver has not confirmed our giving up: the pairs go, and other leases on them are opened again."""
        if (link := self.link) is not None:
            link.fail(PeerLost(f"{link.peer} did not confirm an abort within {self._abort_timeout_s} s"))
        self.end(error)

    def _finish(self) -> None:
        if self.state is None or self.opened is None or self.link is None or self._source.is_busy:
            return
        if (error := self._coverage.missing()) is not None:
            self.withdraw(error, error.message, error)
        else:
            self._moved = dict(self.used)
            self._course.begin()
            self.link.commit(self, self.state)
