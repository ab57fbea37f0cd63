"""One lease being written over rdma."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from distserve.errors import Cancelled, DistServeError, LeaseRevoked, PeerLost, TransportError
from distserve.kv.checksum import Words
from distserve.messages import RemoteRegion, TrafficClass
from distserve.transport.base import Span, Transfer
from distserve.transport.fence import post
from distserve.transport.outbound import fresh
from distserve.transport.rdma.connect import bytes_by_class, lane_for
from distserve.transport.rdma.frames import Opened
from distserve.transport.rdma.reactor import Reactor
from distserve.transport.rdma.written import Coverage, Written, joined, sums_of
from distserve.transport.rows import PoolRows
from distserve.transport.spans import Ids, as_ids, check_span

if TYPE_CHECKING:
    from distserve.transport.rdma.sender_link import SenderLink

Outcome: TypeAlias = "int | DistServeError"  # bytes moved, or why not


class RdmaTransfer(Transfer):
    """Made by its sender. write() is for any thread, commit() and abort() for the sender's loop; what the reactor's
    thread does is told so. Links come and go under a transfer: it fails only when its lease does, or when no link
    could be had for peer_timeout_s.

    Our blocks are read by the device. A commit() that has returned, and one or an abort() that has raised or
    returned, has seen every write completed or its queue pair destroyed.
    """

    def __init__(
        self,
        region: RemoteRegion,
        rows: PoolRows,
        pool_address: int,
        traffic_class: TrafficClass,
        reactor: Reactor,
        *,
        summing: Executor,
        abort_timeout_s: float,
        on_end: Callable[[RdmaTransfer], None],
        on_moved: Callable[[dict[TrafficClass, int], float], None],
    ) -> None:
        """on_moved: told the bytes by the class they went in and the seconds since now, if it is adopted."""
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
        self._written: list[Written] = []
        self._coverage = Coverage(rows, self.num_blocks, self.lease_id)
        self._num_summing = 0  # spans that the summing thread still reads
        self._last: Outcome | None = None  # what to end with when it does so no more
        self._addresses: npt.NDArray[np.int64] = np.empty(0, np.int64)  # of each target block, over there
        self._keys: npt.NDArray[np.int64] = np.empty((0, 0), np.int64)  # [lanes, targets]: of the run that it is in
        self._rows = rows
        self._pool_address = pool_address
        self._reactor = reactor
        self._summing = summing
        self._abort_timeout_s = abort_timeout_s
        self._on_end = on_end
        self._on_moved = on_moved
        self._opened_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._ending = False
        self._moved: dict[int, int] = {}
        self._failure: DistServeError | None = None
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._release: asyncio.Task[None] | None = None

    @property
    def failure(self) -> DistServeError | None:
        return self._failure

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
            check_span(span, self._rows.num_layers, self._rows.num_blocks, self.num_blocks)
        given = tuple(spans)
        self._tell(lambda: self._take(given, awaited))

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
            post(self._loop, self.settle, PeerLost("the rdma devices of this host are closed"))

    def settle(self, outcome: Outcome) -> None:
        """On the loop, once our blocks are read no more. The first outcome counts."""
        if isinstance(outcome, DistServeError):
            self._failure = self._failure or outcome
        if not self._outcome.done():
            self._outcome.set_result(outcome)
            self._on_end(self)

    # -- on the reactor's thread

    def _take(self, spans: Sequence[Span], awaited: bool) -> None:
        if self.is_over:
            return
        traffic_class: TrafficClass = "decode" if awaited and self.traffic_class == "prefill" else self.traffic_class
        for span in spans:
            if not span.targets:
                continue
            written = Written(
                span.layer_start, span.layer_stop, as_ids(span.source_blocks), as_ids(span.targets), traffic_class
            )
            self._written.append(written)
            self._coverage.add(written)
            try:
                self._post(written)
            except TransportError as e:
                self.withdraw(e, e.message, e)
                return
            # After posting: the device is at work meanwhile. On a thread of its own: the reactor must answer.
            self._num_summing += 1
            try:
                self._summing.submit(self._sum, written)
            except RuntimeError:  # stopping
                self._num_summing -= 1

    def _sum(self, written: Written) -> None:
        """On the summing thread."""
        try:
            sums = sums_of(written, self._rows, lambda: self.is_over)
        except Exception as e:  # nobody else would end the transfer
            error = TransportError(f"lease {self.lease_id} could not be summed: {type(e).__name__}: {e}")
            sums = np.zeros(len(written.targets), np.uint64)
            self._reactor.call(lambda: self.withdraw(error, error.message, error))
        if not self._reactor.call(lambda: self._summed(written, sums)):
            post(self._loop, self.settle, PeerLost("the rdma devices of this host are closed"))

    def _summed(self, written: Written, sums: Words) -> None:
        np.add.at(self.sums, written.targets, sums)
        self._num_summing -= 1
        if self._num_summing:
            return
        if self._last is not None:
            post(self._loop, self.settle, self._last)
        elif not self.is_over:
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
        self.opened = opened
        self._addresses = np.zeros(self.num_blocks, np.int64)
        self._keys = np.full((max(opened.runs, default=0) + 1, self.num_blocks), -1, np.int64)
        for lane, runs in opened.runs.items():
            for run in runs:
                stop = run.first + run.count
                if not 0 <= run.first < stop <= self.num_blocks:
                    raise TransportError(f"lease {self.lease_id} was opened with a run outside it", value=str(run))
                size = self._rows.block_bytes
                self._addresses[run.first : stop] = run.address + size * np.arange(run.count)
                self._keys[lane, run.first : stop] = run.rkey
        for written in self._written:
            self._post(written)
        self._finish()

    def on_detached(self) -> None:
        """The link is gone, and with it everything that was under way."""
        self.link = None
        self.opened = None
        self.used.clear()

    def withdraw(self, error: DistServeError, reason: str, cause: DistServeError | None = None) -> None:
        """Give the lease up; cause: what was wrong with it on our side."""
        if self.is_over:
            return
        self.is_over = True
        if self.link is None:
            self.end(error)
        else:
            self.link.abort(self, error, reason, cause)

    def end(self, outcome: Outcome) -> None:
        """Nothing of ours is under way any more."""
        self.is_over = True
        self.link = None
        self._written.clear()
        if self._num_summing:
            self._last = outcome
        else:
            post(self._loop, self.settle, outcome)

    def on_lost(self, error: DistServeError) -> None:
        """The receiver says that the lease is dead. What is under way is waited for before the end is told."""
        self.is_over = True
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
        if self.state is None or self.opened is None or self.link is None or self._num_summing:
            return
        if (error := self._coverage.missing()) is not None:
            self.withdraw(error, error.message, error)
        else:
            self._moved = dict(self.used)
            self.link.commit(self, self.state)

    def _post(self, written: Written) -> None:
        if self.opened is None or self.link is None:
            return
        link, num_rails = self.link, self.link.num_rails
        if num_rails == 1:
            self._post_lane(written, lane_for(written.traffic_class, 0), written.sources, written.targets)
            return
        rails = written.targets // link.stripe_blocks % num_rails  # as connect.rail_of
        for rail in range(num_rails):
            chosen = rails == rail
            if chosen.any():
                lane = lane_for(written.traffic_class, rail)
                self._post_lane(written, lane, written.sources[chosen], written.targets[chosen])

    def _post_lane(self, written: Written, lane: int, sources: Ids, targets: Ids) -> None:
        assert self.link is not None
        keys = self._keys[lane, targets] if lane < len(self._keys) else np.full(len(targets), -1)
        if (keys < 0).any():
            raise TransportError(f"lease {self.lease_id} was not opened for lane {lane}", lease_id=self.lease_id)
        rows = self._rows
        offset = written.layer_start * rows.layer_bytes
        height = (written.layer_stop - written.layer_start) * rows.layer_bytes
        here = self._pool_address + sources * rows.block_bytes + offset
        there = self._addresses[targets] + offset
        self.used[lane] = self.used.get(lane, 0) + len(sources) * height
        self.link.write(self, lane, list(joined(here, there, keys, height, height == rows.block_bytes)))
