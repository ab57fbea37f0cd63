"""The sending end of a link: posts the writes of its transfers and hears what became of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from distserve.errors import DistServeError, PeerLost, TransportError
from distserve.transport import framing
from distserve.transport.rdma import frames
from distserve.transport.rdma.frames import Kind
from distserve.transport.rdma.lanes import Bulk, Counts, Lane
from distserve.transport.rdma.link import Link
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.reactor import Reactor
from distserve.transport.rdma.transfer import RdmaTransfer

log = logging.getLogger(__name__)


class SenderLink(Link):
    def __init__(
        self,
        reactor: Reactor,
        lanes: dict[int, Lane],
        options: RdmaOptions,
        counts: Counts,
        peer: str,
        on_end: Callable[[Any, DistServeError], None],
        *,
        num_rails: int,
        stripe_blocks: int,
        on_greeted: Callable[[], object],
    ) -> None:
        super().__init__(reactor, lanes, options, counts, peer, on_end)
        self.num_rails = num_rails
        self.stripe_blocks = stripe_blocks
        self.transfers: dict[tuple[int, int], RdmaTransfer] = {}
        self._withdrawals: dict[tuple[int, int], DistServeError] = {}  # given up by us, and why
        self._on_greeted = on_greeted

    @property
    def is_busy(self) -> bool:
        return bool(self.transfers) or not self.has_greeted

    # -- for transfers

    def open(self, transfer: RdmaTransfer) -> None:
        self.transfers[transfer.lease_id, transfer.epoch] = transfer
        self.send(Kind.OPEN, frames.Open(transfer.lease_id, transfer.epoch, transfer.traffic_class))

    def write(self, transfer: RdmaTransfer, lane: int, writes: list[Bulk], done: Callable[[], object]) -> None:
        """done: the last of them has completed; never called if they are dropped, or the link breaks."""

        def written() -> None:
            done()
            self._progress(transfer)

        self.lanes[lane].write(writes, transfer, written)

    def commit(self, transfer: RdmaTransfer, state: bytes) -> None:
        """The last write of each lane that carried blocks says so; the rest goes by the control lane, at once."""
        assert transfer.opened is not None
        for lane in sorted(transfer.used):
            self.lanes[lane].mark(transfer, transfer.opened.ticket)
        self.send_frame(frames.commit_frame(transfer.lease_id, transfer.epoch, transfer.used, transfer.sums, state))

    def abort(self, transfer: RdmaTransfer, error: DistServeError, reason: str, cause: DistServeError | None) -> None:
        """Stops writing, then tells the receiver; the transfer ends with its answer."""
        key = (transfer.lease_id, transfer.epoch)
        wire = None if cause is None else framing.wire_error(cause)
        self._withdrawals[key] = error

        def stopped() -> None:
            if self.error is None and self.transfers.get(key) is transfer:
                self.send(Kind.ABORT, frames.Abort(transfer.lease_id, transfer.epoch, reason, wire))

        self._stop(transfer, stopped)

    def _stop(self, transfer: RdmaTransfer, done: Callable[[], object]) -> None:
        """Posts nothing more for it; done is called when nothing of it is under way."""
        transfer.cease()
        for lane in self.lanes:
            lane.drop(transfer)

        def idle() -> None:
            transfer.on_idle()
            done()

        self._when_idle(transfer, idle)

    def _when_idle(self, transfer: RdmaTransfer, done: Callable[[], object]) -> None:
        left = len(self.lanes)

        def idle() -> None:
            nonlocal left
            left -= 1
            if not left and (self.error is None or transfer.is_over):
                done()

        for lane in list(self.lanes):
            lane.when_idle(transfer, idle)

    def _progress(self, transfer: RdmaTransfer) -> None:
        now = time.monotonic()
        if not transfer.is_over and now - transfer.progress_at >= self._options.progress_s:
            transfer.progress_at = now
            self.send(Kind.PROGRESS, frames.LeaseName(transfer.lease_id, transfer.epoch))

    # -- frames

    def on_frame(self, kind: Kind, body: Any) -> None:
        match kind:
            case Kind.WELCOME:
                self.has_greeted = True
                self._on_greeted()
            case Kind.OPENED:
                transfer = self.transfers.get((body.lease_id, body.epoch))
                if transfer is not None and not transfer.is_over:
                    transfer.on_opened(body)
            case Kind.ACK:
                self._answered(body)
            case Kind.LOST:
                self._lost(body)
            case Kind.PING:
                pass
            case Kind.BYE:
                self.fail(PeerLost(f"{self.peer} closed the connection", peer=self.peer))
            case _:
                raise self.unexpected(kind)

    def on_ticket(self, lane: int, ticket: int) -> None:
        self.fail(TransportError(f"a ticket from {self.peer}, which receives", value=ticket))

    def _answered(self, ack: framing.Ack) -> None:
        key = (ack.lease_id, ack.epoch)
        transfer = self.transfers.get(key)
        if transfer is None:
            return
        withdrawn = self._withdrawals.get(key)
        if ack.verb == "abort":
            if withdrawn is not None:
                self._end(transfer, withdrawn)
        elif ack.error is not None:
            error = framing.error_of(ack.error)
            self._stop(transfer, lambda: self._end(transfer, error))
        else:
            # Every byte has arrived; the device may not have heard of each, and would read it again to send it again.
            self._when_idle(transfer, lambda: self._end(transfer, ack.num_bytes))

    def _lost(self, lost: framing.Lost) -> None:
        transfer = self.transfers.get((lost.lease_id, lost.epoch))
        error = framing.error_of(lost.error)

        def stopped() -> None:
            self.send(Kind.STOPPED, frames.LeaseName(lost.lease_id, lost.epoch))
            if transfer is not None and self.error is None:
                self._end(transfer, error)

        if transfer is None:
            stopped()
        else:
            transfer.on_lost(error)
            self._stop(transfer, stopped)

    def _end(self, transfer: RdmaTransfer, outcome: int | DistServeError) -> None:
        key = (transfer.lease_id, transfer.epoch)
        self.transfers.pop(key, None)
        self._withdrawals.pop(key, None)
        transfer.end(outcome)

    def on_broken(self) -> None:
        pass  # what their end means for transfers is known once they are destroyed

    def on_closed(self) -> None:
        transfers, self.transfers = self.transfers, {}
        withdrawals, self._withdrawals = self._withdrawals, {}
        for key, transfer in transfers.items():
            if transfer.is_over:  # nobody needs the lease any more, and the pairs are gone
                transfer.end(withdrawals.get(key) or transfer.failure or PeerLost(f"{self.peer} is gone"))
            else:
                transfer.on_detached()
