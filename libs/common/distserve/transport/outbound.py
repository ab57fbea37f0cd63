"""One lease being written by a sender."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from distserve.errors import Cancelled, DistServeError, LayoutMismatch, LeaseRevoked, PeerLost, TransportError
from distserve.messages import RemoteRegion
from distserve.transport import framing
from distserve.transport.base import Span, Transfer, TransferFacts
from distserve.transport.fence import Fence
from distserve.transport.framing import FrameType
from distserve.transport.rows import SummedRows
from distserve.transport.spans import check_span

if TYPE_CHECKING:
    from distserve.transport.outbound_connection import OutboundConnection

Outcome: TypeAlias = "int | DistServeError"  # bytes moved, or why not


def fresh(error: DistServeError) -> DistServeError:
    """A copy to raise: one failure of a connection ends many transfers, each with a traceback of its own."""
    return type(error)(error.message, **error.fields)


def _expire(waiter: asyncio.Future[Outcome]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


def from_our_side(refusal: LayoutMismatch, peer: str) -> LayoutMismatch:
    """The receiver's refusal with ours and theirs the right way round."""
    field, ours, theirs = (refusal.fields.get(name) for name in ("field", "theirs", "ours"))
    return LayoutMismatch(
        f"{peer} has another KV layout: {field} is {ours!r} here and {theirs!r} there",
        field=field,
        ours=ours,
        theirs=theirs,
    )


class OutboundTransfer(Transfer):
    """Made by its sender. write() is for any thread, the rest for the sender's loop.

    The fence is round our own blocks: who sends goes in to read them, for one frame at a time, and
    commit() and abort() return only once it is shut. With shm the receiver reads them too. It says when it has
    stopped (ACK, LOST); if it does not say so in abort_timeout_s the connection is cut. A receiver that was frozen
    in mid-copy may then still read blocks that have a new owner, when it wakes up; what it makes of them is never
    adopted: it finds the connection ended, and had a COMMIT reached it before, the checksums in it, made while the
    blocks were still ours, do not match what it copied.
    """

    def __init__(
        self,
        region: RemoteRegion,
        rows: SummedRows,
        connection: OutboundConnection,
        abort_timeout_s: float,
        on_moved: Callable[[int, float], None],
        facts: TransferFacts,
    ) -> None:
        """on_moved: told the bytes and the seconds since now of a transfer that was adopted. facts: as they are now,
        when its first byte could move."""
        self.lease_id = region.lease_id
        self.epoch = region.epoch
        self.num_blocks = len(region.block_ids)
        self.fence = Fence()
        self.sums = np.zeros(self.num_blocks, np.uint64)  # changed by who has the connection's turn only
        self.sending_s = 0.0  # so is this: spent on giving its bytes to the socket
        self._rows = rows
        self._connection = connection
        self._abort_timeout_s = abort_timeout_s
        self._on_moved = on_moved
        self._facts = facts
        self._opened_at = time.monotonic()
        self._whole_at: float | None = None  # all that was written has been sent, and the COMMIT is next
        self.begun = False  # something was queued that opens the lease at the receiver
        self._ending = False
        self._failure: DistServeError | None = None
        self._outcome: Outcome | None = None
        self._waiters: list[asyncio.Future[Outcome]] = []
        self._release: asyncio.Task[None] | None = None
        self._withdrawal: DistServeError | None = None  # why we gave up

    @property
    def ending(self) -> bool:
        """Its COMMIT or ABORT is on its way."""
        return self._ending or self.fence.closed

    @property
    def failure(self) -> DistServeError | None:
        return self._failure

    @property
    def facts(self) -> TransferFacts:
        return self._facts

    # -- Transfer

    def write(self, spans: Sequence[Span], *, awaited: bool = False) -> None:
        """One connection carries one class, so `awaited` changes nothing here.

        Raises KVError for a span that no receiver could take: layers or blocks that do not exist."""
        if self._failure is not None:
            return  # commit() says it
        if self._ending:
            raise TransportError(
                f"lease {self.lease_id} is committed, nothing more may be written", lease_id=self.lease_id
            )
        for span in spans:
            check_span(span, self._rows.num_layers, self._rows.num_blocks, self.num_blocks)
        self.begun = True
        self._connection.enqueue_spans(self, tuple(spans))

    async def commit(self, state: bytes, *, timeout_s: float) -> int:
        """A commit that raises may have been adopted all the same, if the connection broke while the receiver's
        answer was on its way: sequences carry an attempt number for that reason."""
        if self._ending:
            raise fresh(
                self._failure
                or TransportError(f"lease {self.lease_id} was committed or aborted before", lease_id=self.lease_id)
            )
        self._ending = True
        if self._outcome is None:
            self.begun = True
            self._connection.enqueue_frame(self, lambda: self._commit_frame(state))
        try:
            outcome = await self._settled(timeout_s)
        except TimeoutError:
            timed_out = PeerLost(
                f"lease {self.lease_id} was not acknowledged within {timeout_s} s",
                lease_id=self.lease_id,
                timeout_s=timeout_s,
            )
            await self._give_up(timed_out, f"not acknowledged within {timeout_s} s")
            outcome = await self._settled()
            if isinstance(outcome, PeerLost):
                outcome = timed_out  # says more than that the connection was cut in the end
        except asyncio.CancelledError:
            error = Cancelled(f"the commit of lease {self.lease_id} was cancelled", lease_id=self.lease_id)
            await self._give_up(error, "the commit was cancelled")
            raise
        if isinstance(outcome, DistServeError):
            await self._let_go()
            raise fresh(outcome)
        self._connection.forget(self)
        self.fence.close()
        now = time.monotonic()
        self._note_facts(now, outcome)
        self._on_moved(outcome, now - self._opened_at)
        return outcome

    async def abort(self, reason: str) -> None:
        if isinstance(self._outcome, int):
            return  # committed
        error = LeaseRevoked(f"lease {self.lease_id} was aborted: {reason}", lease_id=self.lease_id, reason=reason)
        self._failure = self._failure or error  # first: a write() that sees the end must see why
        self._ending = True
        await self._give_up(error, reason)

    # -- for the connection, on the loop

    def settle(self, outcome: Outcome) -> None:
        """The first outcome counts."""
        if isinstance(outcome, DistServeError):
            self._failure = self._failure or outcome
            self.fence.close()  # what is queued is skipped
        if self._outcome is None:
            self._outcome = outcome
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(outcome)

    def withdrawn(self) -> None:
        """The receiver has confirmed our ABORT."""
        if self._withdrawal is not None:
            self.settle(self._withdrawal)

    # -- inside

    async def _settled(self, timeout_s: float | None = None) -> Outcome:
        """Waits for the outcome. Each caller has a future of its own, which its own cancel or timeout ends. Raises
        TimeoutError."""
        if self._outcome is not None:
            return self._outcome
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Outcome] = loop.create_future()
        self._waiters.append(waiter)
        if timeout_s is None:
            return await waiter
        timer = loop.call_later(timeout_s, _expire, waiter)  # a fifth of asyncio.timeout()'s price
        try:
            return await waiter
        finally:
            timer.cancel()

    def _commit_frame(self, state: bytes) -> bytes:
        self._whole_at = time.monotonic()
        return framing.commit_frame(self.lease_id, self.epoch, self.sums, state)

    async def _give_up(self, error: DistServeError, reason: str) -> None:
        """Ends the transfer, unless it has ended; returns when our blocks are read no more. Any number of callers
        wait for one and the same ending."""
        if self._release is None:
            self._failure = self._failure or error
            self.fence.close()
            self._release = asyncio.create_task(self._withdraw(error, reason))
        await asyncio.shield(self._release)

    async def _withdraw(self, error: DistServeError, reason: str) -> None:
        self._withdrawal = error
        try:
            async with asyncio.timeout(self._abort_timeout_s):
                await self.fence.shut()
                if self._outcome is None:
                    ref = framing.LeaseRef(self.lease_id, self.epoch, reason)
                    self._connection.enqueue_urgent(framing.frame(FrameType.ABORT, ref))
                    await self._settled()
        except TimeoutError:
            self._connection.fail(
                PeerLost(f"{self._connection.peer} did not confirm an abort within {self._abort_timeout_s} s")
            )
            # Ends the thread, which then settles us: its waits all end with the socket.
            await self._settled()
            await self.fence.shut()
        self._connection.forget(self)
        self._note_facts(time.monotonic(), 0)
        self.settle(error)

    async def _let_go(self) -> None:
        """The receiver has let go; wait for our own thread to have done so."""
        await self.fence.shut()
        self._connection.forget(self)
        self._note_facts(time.monotonic(), 0)

    def _note_facts(self, now: float, num_bytes: int) -> None:
        """It has ended."""
        tail_s = 0.0 if self._whole_at is None else now - self._whole_at
        self._facts = replace(self._facts, num_bytes=num_bytes, wire_s=self.sending_s + tail_s)
