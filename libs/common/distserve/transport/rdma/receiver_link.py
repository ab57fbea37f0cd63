"""The receiving end of a link: opens leases to the peer, takes them back, and notices when one is whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from distserve.errors import Cancelled, DistServeError, PeerLost, TransportError
from distserve.transport import framing
from distserve.transport.inbound import InboundLease, InboundLeases
from distserve.transport.rdma import frames
from distserve.transport.rdma.connect import lanes_of
from distserve.transport.rdma.exposure import Exposure, Rail
from distserve.transport.rdma.frames import Kind
from distserve.transport.rdma.lanes import Counts, Lane
from distserve.transport.rdma.link import Link
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.reactor import Reactor
from distserve.transport.rdma.room import Place, Room

log = logging.getLogger(__name__)

INVALIDATE_S = 1.0  # for a live device to invalidate windows, which takes it microseconds; then the pairs go


class LeaseEvents(Protocol):
    """What the receiver does about its leases. Called on the reactor's thread."""

    def answer(self, link: ReceiverLink, lease_id: int, epoch: int) -> bool:
        """Whether the lease's commit came by an earlier link. Its outcome is then sent by this one, now or when it is
        known."""

    def whole(self, link: ReceiverLink, exposure: Exposure) -> None:
        """Every block has come and none can be written any more: verify and adopt."""

    def given_up(self, link: ReceiverLink, lease: InboundLease, error: DistServeError) -> None: ...

    def attached(self, lease: InboundLease) -> None:
        """A link has it."""

    def detached(self, link: ReceiverLink, lease: InboundLease) -> None:
        """Its link has failed; its sender may come back with another. Nothing can be written meanwhile."""


class ReceiverLink(Link):
    def __init__(
        self,
        reactor: Reactor,
        lanes: dict[int, Lane],
        options: RdmaOptions,
        counts: Counts,
        peer: str,
        on_end: Callable[[Any, DistServeError], None],
        *,
        leases: InboundLeases,
        events: LeaseEvents,
        room: Room,
        address: int,
    ) -> None:
        """address: of block 0 of what peers write."""
        super().__init__(reactor, lanes, options, counts, peer, on_end)
        self._leases = leases
        self._events = events
        self._room = room
        self._address = address
        self._rails: Sequence[Rail] = ()
        self._exposures: dict[tuple[int, int], Exposure] = {}
        self._by_ticket: dict[int, Exposure] = {}
        self._next_ticket = 1
        self.has_left = False  # the peer has said so: it will not come back

    def use(self, rails: Sequence[Rail]) -> None:
        self._rails = rails

    @property
    def is_busy(self) -> bool:
        return bool(self._exposures)

    # -- frames

    def on_frame(self, kind: Kind, body: Any) -> None:
        match kind:
            case Kind.HELLO:
                self.has_greeted = True
                self.send_frame(frames.greeting(Kind.WELCOME))
            case Kind.OPEN:
                self._open(body)
            case Kind.COMMIT:
                self._commit(body)
            case Kind.ABORT:
                self._abort(body)
            case Kind.STOPPED:
                self._stopped(body)
            case Kind.PROGRESS:
                if (exposure := self._exposures.get((body.lease_id, body.epoch))) is not None:
                    exposure.lease.touch()
            case Kind.PING:
                pass
            case Kind.BYE:
                self.has_left = True
                self.fail(PeerLost(f"{self.peer} closed the connection", peer=self.peer))
            case _:
                raise self.unexpected(kind)

    def on_ticket(self, lane: int, ticket: int) -> None:
        exposure = self._by_ticket.get(ticket)
        if exposure is not None:  # else the lease ended while this was on its way
            exposure.marked.add(lane)
            self._complete(exposure)

    def tell_lost(self, lease_id: int, epoch: int, error: DistServeError) -> None:
        self.send(Kind.LOST, framing.Lost(lease_id, epoch, framing.wire_error(error)))

    def _open(self, ask: frames.Open) -> None:
        key = (ask.lease_id, ask.epoch)
        if self._events.answer(self, *key):
            return
        if key in self._exposures:
            raise TransportError(f"{self.peer} opened lease {ask.lease_id} twice", lease_id=ask.lease_id)
        lease = self._leases.claim(ask.lease_id, ask.epoch, self)
        if isinstance(lease, DistServeError):
            self.tell_lost(ask.lease_id, ask.epoch, lease)
            return
        self._events.attached(lease)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket % 0xFFFFFFFF + 1
        lanes = {i: self.lanes[i] for i in lanes_of(ask.traffic_class, len(self._rails))}
        exposure = Exposure(lease, ticket, ask.traffic_class, lanes)
        self._exposures[key] = self._by_ticket[ticket] = exposure

        def opened() -> None:
            self.send(Kind.OPENED, frames.Opened(lease.lease_id, lease.epoch, ticket, exposure.runs))

        def has_room(place: Place) -> None:
            exposure.place = place
            lease.touch()
            try:
                exposure.open(self._rails, self._options.stripe_blocks, self._address, opened)
            except OSError as e:
                what = f"lease {lease.lease_id} could not be opened for writing: {e}"
                self._refuse(exposure, TransportError(what, lease_id=lease.lease_id))

        try:
            exposure.place = self._room.ask(lease, has_room)
        except TransportError as e:
            self._refuse(exposure, e)

    def _refuse(self, exposure: Exposure, error: TransportError) -> None:
        """Nothing was bound or told."""
        lease = exposure.lease
        exposure.gone()
        self._forget(exposure)
        self.tell_lost(lease.lease_id, lease.epoch, error)
        self._events.given_up(self, lease, error)

    def _commit(self, commit: frames.Commit) -> None:
        head: framing.CommitHead = commit.head
        exposure = self._exposures.get((head.lease_id, head.epoch))
        if exposure is None or exposure.is_closing:
            return  # LOST is on its way
        if not commit.lanes.keys() <= exposure.lanes.keys():
            raise TransportError(f"a commit by lanes {sorted(commit.lanes)} that lease {head.lease_id} does not use")
        exposure.commit = commit
        self._complete(exposure)

    def _complete(self, exposure: Exposure) -> None:
        """Adopts once every lane's ticket and the commit have come. The windows go first: what is verified must not
        change any more."""
        commit = exposure.commit
        if commit is None or exposure.is_closing or not commit.lanes.keys() <= exposure.marked:
            return
        exposure.lease.touch()
        self._take_back(exposure, lambda: self._events.whole(self, exposure))

    def _abort(self, abort: frames.Abort) -> None:
        exposure = self._exposures.get((abort.lease_id, abort.epoch))
        if exposure is None:
            self.send(Kind.ACK, framing.Ack(abort.lease_id, abort.epoch, "abort"))
            return
        error: DistServeError = Cancelled(
            f"{self.peer} gave lease {abort.lease_id} up: {abort.reason}", lease_id=abort.lease_id, reason=abort.reason
        )
        if abort.error is not None:
            error = framing.error_of(abort.error)

        def ended() -> None:
            self.send(Kind.ACK, framing.Ack(abort.lease_id, abort.epoch, "abort"))
            self._events.given_up(self, exposure.lease, error)

        self._take_back(exposure, ended)

    def _stopped(self, name: frames.LeaseName) -> None:
        exposure = self._exposures.get((name.lease_id, name.epoch))
        if exposure is not None:
            self._take_back(exposure, None)

    # -- taking back

    def fence(self, lease: InboundLease, error: DistServeError, done: Callable[[], object]) -> None:
        """Nothing is written under the lease any more once done is called: the peer is asked to stop; if it does not
        say so in time its windows are invalidated, and if there are none, or that does not work either, the pairs
        are destroyed."""
        exposure = self._exposures.get((lease.lease_id, lease.epoch))
        if self.error is not None:
            done()
            return
        self.tell_lost(lease.lease_id, lease.epoch, error)
        if exposure is None:
            done()
            return
        had_told, by_windows = exposure.is_open, exposure.is_by_windows_only(self._rails)

        def fenced() -> None:
            self._forget(exposure)
            done()

        if exposure.is_closing or not had_told:
            self._take_back(exposure, fenced)
            return
        exposure.on_closed(fenced)

        def silent() -> None:
            if by_windows:
                self._take_back(exposure, None)
            else:
                self.fail(PeerLost(f"{self.peer} did not stop writing lease {lease.lease_id}", peer=self.peer))

        exposure.stop_timer = self._reactor.later(self._options.stop_timeout_s, silent)

    def _take_back(self, exposure: Exposure, done: Callable[[], object] | None) -> None:
        def closed() -> None:
            timer.cancel()
            self._forget(exposure)
            if done is not None:
                done()

        def stuck() -> None:
            self.fail(PeerLost(f"memory windows on the link with {self.peer} could not be invalidated", peer=self.peer))

        timer = self._reactor.later(INVALIDATE_S, stuck)
        exposure.close(closed)

    def _forget(self, exposure: Exposure) -> None:
        self._exposures.pop((exposure.lease.lease_id, exposure.lease.epoch), None)
        self._by_ticket.pop(exposure.ticket, None)

    def on_broken(self) -> None:
        for exposure in self._exposures.values():
            exposure.release_windows()  # while they are bound a device may keep their pair

    def on_closed(self) -> None:
        exposures = list(self._exposures.values())
        for exposure in exposures:
            exposure.gone()  # whoever waited for its fence is told
        self._exposures.clear()
        self._by_ticket.clear()
        for exposure in exposures:
            lease = exposure.lease
            if lease.connection is self and not lease.fence.closed:
                lease.connection = None
                self._events.detached(self, lease)
