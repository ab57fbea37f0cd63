"""Building one link from the sending side: half of the pairs, a request over the bus, the rest, a greeting."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial

from distserve.bus.base import Bus
from distserve.errors import DistServeError, PeerLost, TransportError
from distserve.kv.layout import require_same
from distserve.messages import KVLayout, LinkReply, LinkRequest, RailPairs, decode_as, encode
from distserve.transport.fence import post
from distserve.transport.rdma import connect, frames
from distserve.transport.rdma.frames import Kind
from distserve.transport.rdma.halves import Devices, Halves
from distserve.transport.rdma.lanes import Lane
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.ports import Rail, match_rails
from distserve.transport.rdma.reactor import Reactor
from distserve.transport.rdma.sender_link import SenderLink

OnEnd = Callable[[SenderLink, DistServeError], None]


class Dialer:
    """For the sender's loop."""

    def __init__(
        self,
        bus: Bus,
        reactor: Reactor,
        devices: Devices,
        lanes: dict[int, Lane],
        options: RdmaOptions,
        layout: KVLayout,
        sender_id: str,
    ) -> None:
        self._bus = bus
        self._reactor = reactor
        self._devices = devices
        self._lanes = lanes
        self._options = options
        self._layout = layout
        self._sender_id = sender_id
        self._instance = secrets.token_hex(8)  # names this process: a later epoch of it takes an earlier one's place

    async def dial(self, address: str, epoch: int, on_end: OnEnd) -> SenderLink:
        """A link whose path works both ways; on_end is called on the loop when it has failed, also if that is before
        this returns. Raises DistServeError, OSError."""
        halves = await self._reactor.run(lambda: self._devices.make_halves(self._options), undo=Halves.close)
        try:
            request = LinkRequest(
                sender_id=self._sender_id,
                instance=self._instance,
                epoch=epoch,
                layout=self._layout,
                rails=await self._reactor.run(halves.offers),
            )
            common = self._options.common
            # A message may get lost: while transfers wait there is time for a second attempt and a third.
            patience_s = min(common.connect_timeout_s, common.peer_timeout_s / 3)
            answer = await self._bus.request(connect.subject(address), encode(request), timeout_s=patience_s)
            reply = decode_as(LinkReply, answer)
            require_same(self._layout, reply.layout)
            connect.check_reply(reply, len(request.rails))
            greeted: asyncio.Future[DistServeError | None] = asyncio.get_running_loop().create_future()
            link = await self._reactor.run(
                lambda: self._join(address, halves, reply, greeted, on_end),
                undo=lambda link: link.fail(PeerLost("the set-up was given up")),
            )
            try:
                error = await greeted
            except BaseException:
                self._reactor.call(partial(link.fail, PeerLost("the set-up was given up")))
                raise
            if error is not None:
                raise error
            return link
        finally:
            self._reactor.call(halves.close)

    def _join(
        self,
        address: str,
        halves: Halves,
        reply: LinkReply,
        greeted: asyncio.Future[DistServeError | None],
        on_end: OnEnd,
    ) -> SenderLink:
        """On the reactor's thread: connects our halves and says hello, whose answer shows that the path works."""
        loop = greeted.get_loop()

        def tell(error: DistServeError | None) -> None:
            post(loop, _resolve, greeted, error)

        def ended(link: SenderLink, error: DistServeError) -> None:
            tell(error)
            post(loop, on_end, link, error)

        link = SenderLink(
            self._reactor,
            self._lanes,
            self._options,
            self._devices.counts,
            f"the rdma receiver at {address}",
            ended,
            num_rails=len(reply.rails),
            stripe_blocks=reply.stripe_blocks,
            on_greeted=lambda: tell(None),
        )
        offers = self._devices.offers
        try:
            for index, theirs in zip(reply.matched, reply.rails, strict=True):
                # These two alone: which GIDs they talk by does not hang on what other devices there are.
                found = match_rails([offers[index]], [theirs.rail])
                self._add_rail(link, halves, index, found[0] if found else None, theirs)
        except Exception as e:
            link.fail(e if isinstance(e, DistServeError) else TransportError(f"a queue pair could not be set up: {e}"))
            return link
        link.watch()
        link.send_frame(frames.greeting(Kind.HELLO))
        return link

    def _add_rail(self, link: SenderLink, halves: Halves, index: int, rail: Rail | None, theirs: RailPairs) -> None:
        if rail is None:
            raise TransportError(f"{link.peer} matches device {index} with one that it has no path to", value=index)
        link.add_rail(
            self._devices.nics[index],
            self._devices.pools[index],
            halves.take(index),
            rail.gid_index,
            [connect.peer_address(rail, half) for half in theirs.pairs],
        )


def _resolve(future: asyncio.Future[DistServeError | None], result: DistServeError | None) -> None:
    if not future.done():
        future.set_result(result)
