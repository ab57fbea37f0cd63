"""A receiver's links: set up on request, one for each sender's process, and taken down."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from distserve.errors import DistServeError, PeerLost, TransportError
from distserve.messages import KVLayout, LinkReply, LinkRequest, RailOffer
from distserve.transport.inbound import InboundLeases
from distserve.transport.rdma import connect, frames
from distserve.transport.rdma.exposure import rails_of
from distserve.transport.rdma.frames import Kind
from distserve.transport.rdma.halves import Devices
from distserve.transport.rdma.lanes import Lane
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.ports import match_rails
from distserve.transport.rdma.reactor import Reactor
from distserve.transport.rdma.receiver_link import LeaseEvents, ReceiverLink
from distserve.transport.rdma.remembered import remember
from distserve.transport.rdma.room import Room

log = logging.getLogger(__name__)


class Links:
    """For the reactor's thread. A sender that connects anew, under a higher epoch, takes its earlier link's place."""

    def __init__(
        self,
        reactor: Reactor,
        devices: Devices,
        lanes: dict[int, Lane],
        options: RdmaOptions,
        layout: KVLayout,
        leases: InboundLeases,
        events: LeaseEvents,
        room: Room,
    ) -> None:
        self._reactor = reactor
        self._devices = devices
        self._lanes = lanes
        self._options = options
        self._layout = layout
        self._leases = leases
        self._events = events
        self._room = room
        self._links: dict[str, ReceiverLink] = {}  # by the sender's instance
        self._epochs: OrderedDict[str, int] = OrderedDict()  # of each instance's latest link
        self._closing = False

    def accept(self, request: LinkRequest) -> LinkReply:
        """Raises TransportError."""
        epoch, earlier = self._epochs.get(request.instance, -1), self._links.get(request.instance)
        if request.epoch <= epoch:
            raise TransportError(
                f"{request.sender_id} connects under epoch {request.epoch}, it has used {epoch} before",
                epoch=request.epoch,
                current=epoch,
            )
        if earlier is not None:
            earlier.fail(PeerLost(f"{request.sender_id} has connected anew", peer=request.sender_id))
        offers = self._devices.offers
        matched = match_rails(offers, [rail.rail for rail in request.rails])
        if not matched:
            theirs_in_words, ours_in_words = _gids([r.rail for r in request.rails]), _gids(offers)
            raise TransportError(
                f"no RDMA path to {request.sender_id}: its GIDs {theirs_in_words}, ours {ours_in_words}",
                theirs=theirs_in_words,
                ours=ours_in_words,
            )
        link = ReceiverLink(
            self._reactor,
            self._lanes,
            self._options,
            self._devices.counts,
            request.sender_id,
            lambda link, error: self._on_link_end(request.instance, link, error),
            leases=self._leases,
            events=self._events,
            room=self._room,
            address=self._devices.access.memory.address,
        )
        by_index = {rail.rail.index: rail for rail in request.rails}
        halves = self._devices.make_halves(self._options)
        try:
            ours = halves.offers()
            places = [next(i for i, offer in enumerate(offers) if offer.index == rail.index) for rail in matched]
            for place, rail in zip(places, matched, strict=True):
                theirs = by_index[rail.their_index]
                peers = [connect.peer_address(rail, half) for half in theirs.pairs]
                link.add_rail(
                    self._devices.nics[place], self._devices.pools[place], halves.take(place), rail.gid_index, peers
                )
        except OSError as e:
            link.fail(PeerLost(f"the pairs with {request.sender_id} could not be set up: {e}"))
            raise TransportError(f"queue pairs could not be set up: {e}") from e
        except BaseException:
            link.fail(PeerLost(f"the pairs with {request.sender_id} could not be set up"))
            raise
        finally:
            halves.close()
        link.use(rails_of(self._devices, places, self._options))
        self._links[request.instance] = link
        remember(self._epochs, request.instance, request.epoch)
        link.watch()
        self._reactor.later(self._options.common.connect_timeout_s, lambda: self._require_greeting(link))
        positions = {rail.rail.index: i for i, rail in enumerate(request.rails)}
        return LinkReply(
            layout=self._layout,
            matched=[positions[rail.their_index] for rail in matched],
            rails=[ours[place] for place in places],
            stripe_blocks=self._options.stripe_blocks,
        )

    def _require_greeting(self, link: ReceiverLink) -> None:
        if not link.has_greeted:
            link.fail(PeerLost(f"{link.peer} has set up a link and then said nothing over it", peer=link.peer))

    def _on_link_end(self, instance: str, link: ReceiverLink, error: DistServeError) -> None:
        log.log(
            logging.DEBUG if self._closing else logging.INFO,
            "the rdma link from %s ended: %s",
            link.peer,
            error,
        )
        if self._links.get(instance) is link:
            del self._links[instance]

    def say_bye(self, done: Callable[[], object]) -> None:
        """done: every peer has acknowledged that we stop."""
        links = list(self._links.values())
        left = len(links)

        def said() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                done()

        if not links:
            done()
        for link in links:
            link.send_frame(frames.frame(Kind.BYE), said)

    def close(self, error: PeerLost) -> None:
        self._closing = True
        for link in list(self._links.values()):
            link.fail(error)


def _gids(offers: Sequence[RailOffer]) -> str:
    return ", ".join(gid for offer in offers for _, gid, _ in offer.gids) or "none"
