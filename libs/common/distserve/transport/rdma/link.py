"""What both ends of a link have in common: its lanes, the frames on its control lane, and its end."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from distserve.errors import DistServeError, PeerLost, TransportError
from distserve.transport.rdma import frames
from distserve.transport.rdma.buffers import MessageBuffers
from distserve.transport.rdma.connect import CLASSES, CONTROL
from distserve.transport.rdma.device import Completion, Nic, Pair, PairAddress, Region
from distserve.transport.rdma.frames import Frames, Kind
from distserve.transport.rdma.lanes import Counts, Lane
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.reactor import Reactor, Timer

log = logging.getLogger(__name__)


IDLE_PINGS = 10  # a link with nothing open on it is asked after so much more silence


class Link(ABC):
    """All pairs between one sender and one receiver. It fails as a whole, once; its owner is told and builds another.

    For the reactor's thread. A peer that has been silent is asked for a sign of life, less often if nothing is open: a
    reliable connection tells nothing as long as nothing is sent.
    """

    def __init__(
        self,
        reactor: Reactor,
        lanes: dict[int, Lane],  # the owner's: where completions find their lane, by uid
        options: RdmaOptions,
        counts: Counts,
        peer: str,
        on_end: Callable[[Any, DistServeError], None],
    ) -> None:
        self.peer = peer
        self.lanes: list[Lane] = []
        self.error: DistServeError | None = None
        self.has_greeted = False  # the path has been seen to work in both directions
        self._reactor = reactor
        self._all_lanes = lanes
        self._options = options
        self._counts = counts
        self._on_end = on_end
        self._buffers: MessageBuffers | None = None
        self._frames = Frames(options.common.max_frame_meta_bytes)
        self._heard_at = time.monotonic()
        self._pinged = False
        self._ping_timer: Timer | None = None

    # -- making it

    def add_rail(self, nic: Nic, pool: Region, pairs: list[Pair], gid_index: int, peers: list[PairAddress]) -> None:
        """Connects the pairs of one matched device; the first one added carries the control lane. Takes the pairs.
        Raises OSError: then fail() the link."""
        depth = min(self._options.depth, nic.max_depth)
        if not self.lanes:
            try:
                self._buffers = MessageBuffers(nic, depth)
            except BaseException:
                for pair in pairs:
                    pair.close()
                raise
        for i in range(len(CLASSES)):
            number = len(self.lanes)
            lane = Lane(
                nic,
                pairs[i],
                depth=depth,
                pool=pool,
                buffers=self._buffers if number == CONTROL else None,
                counts=self._counts,
                on_message=self._on_message,
                on_ticket=partial(self.on_ticket, number),
                on_error=self._on_lane_error,
                on_life=self._on_life,
            )
            self.lanes.append(lane)
            self._all_lanes[lane.uid] = lane
        for lane, peer in zip(self.lanes[-len(CLASSES) :], peers, strict=True):
            lane.post_receives()
            lane.pair.connect(gid_index, peer, mtu=peer.mtu)

    def watch(self) -> None:
        """Start looking for signs of life."""
        self._ping_timer = self._reactor.later(self._options.ping_s / 2, self._look)

    # -- frames

    def send(self, kind: Kind, body: msgspec.Struct | None = None) -> None:
        self.send_frame(frames.frame(kind, body))

    def send_frame(self, frame: bytes, done: Callable[[], object] | None = None) -> None:
        if self.error is None and self.lanes:
            self.lanes[CONTROL].send(frame, done)

    def _on_message(self, data: memoryview) -> None:
        try:
            for kind, body in self._frames.feed(bytes(data)):
                if self.error is None:
                    self.on_frame(kind, body)
        except DistServeError as e:
            log.warning("the rdma link with %s is cut: %s", self.peer, e)
            self.fail(e)
        except Exception as e:
            log.exception("the rdma link with %s is cut", self.peer)
            self.fail(TransportError(f"a frame from {self.peer} could not be used: {type(e).__name__}: {e}"))

    @abstractmethod
    def on_frame(self, kind: Kind, body: Any) -> None:
        """Raises TransportError to cut the link."""

    @abstractmethod
    def on_ticket(self, lane: int, ticket: int) -> None: ...

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether somebody depends on the peer's being there."""

    def unexpected(self, kind: Kind) -> TransportError:
        return TransportError(f"a {kind.name} frame from {self.peer}", value=kind.name)

    # -- signs of life

    def _on_life(self) -> None:
        self._heard_at = time.monotonic()
        self._pinged = False

    def _look(self) -> None:
        if self.error is not None:
            return
        silence_s = time.monotonic() - self._heard_at
        patience_s = self._options.ping_s * (1 if self.is_busy else IDLE_PINGS)
        if not self._pinged and silence_s >= patience_s:
            self._pinged = True  # its acknowledgement, by the peer's device, is the sign; none is an error
            self.send(Kind.PING)
        self._ping_timer = self._reactor.later(self._options.ping_s / 2, self._look)

    # -- the end

    def _on_lane_error(self, error: Exception) -> None:
        self.fail(PeerLost(f"{self.peer}: {error}", peer=self.peer))

    def fail(self, error: DistServeError) -> None:
        """Destroys the pairs: when it returns, nothing is read or placed for this link any more. Idempotent."""
        if self.error is not None:
            return
        self.error = error
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        for lane in self.lanes:
            lane.failed = True
            lane.pair.fail()
        self._guarded(self.on_broken)
        for lane in self.lanes:
            self._all_lanes.pop(lane.uid, None)
            self._guarded(lane.close)
        if self._buffers is not None:
            self._guarded(self._buffers.close)
        self._guarded(self.on_closed)
        self._on_end(self, error)

    def _guarded(self, step: Callable[[], object]) -> None:
        """What cannot be cleared up must not keep the rest from being."""
        try:
            step()
        except Exception:
            log.exception("while the rdma link with %s was taken down", self.peer)

    @abstractmethod
    def on_broken(self) -> None:
        """The pairs are in error, so nothing comes or goes; they are about to be destroyed."""

    @abstractmethod
    def on_closed(self) -> None:
        """The pairs are gone; clear up what was on them."""


def dispatch(lanes: dict[int, Lane], completion: Completion) -> None:
    """One that belongs to no lane came from a pair that is closed."""
    lane = lanes.get(completion.wr_id >> 32)
    if lane is not None:
        lane.complete(completion)
