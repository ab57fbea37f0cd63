"""Setting a link up, over the bus: who, which layout, and for each device the pairs of every traffic class.

A link is all the queue pairs between one sender and one receiver: rails (devices matched with each other) times
traffic classes. A *lane* is one of those pairs, numbered rail * len(CLASSES) + class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from distserve.bus.subjects import ROOT
from distserve.errors import TransportError
from distserve.messages import LinkReply, LinkRequest, PairOffer, TrafficClass
from distserve.messages import RailOffer as RailOffer
from distserve.messages import RailPairs as RailPairs
from distserve.transport.rdma.device import PairAddress
from distserve.transport.rdma.ports import Rail
from distserve.transport.spans import Ids

Number = TypeVar("Number", int, Ids)

# The first rail's pair of the first class carries the control frames too: what is said there (keys, state, stop)
# somebody waits for, and it must not queue behind bulk.
CLASSES: tuple[TrafficClass, ...] = ("decode", "prefill", "background")
CONTROL = 0  # lane


def subject(address: str) -> str:
    """Where a receiver takes set-up requests: `address` is that of its endpoint."""
    return f"{ROOT}.rdma.{address}"


def lane_class(lane: int) -> TrafficClass:
    return CLASSES[lane % len(CLASSES)]


def lanes_of(traffic_class: TrafficClass, num_rails: int) -> list[int]:
    """The lanes that a transfer of this class may write by: its own, and of a "prefill" transfer those of "decode"
    too, for what decode waits for."""
    wanted = {traffic_class, "decode"} if traffic_class == "prefill" else {traffic_class}
    return [lane for lane in range(num_rails * len(CLASSES)) if lane_class(lane) in wanted]


def lane_for(traffic_class: TrafficClass, rail: int) -> int:
    return rail * len(CLASSES) + CLASSES.index(traffic_class)


def bytes_by_class(by_lane: Mapping[int, int]) -> dict[TrafficClass, int]:
    """What lanes carried, by the class that their packets are marked with."""
    found: dict[TrafficClass, int] = {}
    for lane, num_bytes in by_lane.items():
        found[lane_class(lane)] = found.get(lane_class(lane), 0) + num_bytes
    return found


def rail_of(target: Number, stripe_blocks: int, num_rails: int) -> Number:
    """Which rail carries block `target` of a lease, or each of them: stripes of consecutive blocks in turn, so that
    neighbours still join into one write."""
    return target // stripe_blocks % num_rails


def check_request(request: LinkRequest) -> None:
    """Raises TransportError for halves that no pair could be made of."""
    _check_halves([len(r.pairs) for r in request.rails], "request")


def check_reply(reply: LinkReply, num_rails: int) -> None:
    """Raises TransportError where it does not fit what was asked with `num_rails` devices."""
    _check_halves([len(r.pairs) for r in reply.rails], "reply")
    if len(reply.matched) != len(reply.rails) or len(set(reply.matched)) != len(reply.matched):
        raise TransportError(f"a set-up reply of {len(reply.rails)} rails matches {reply.matched}")
    if any(not 0 <= index < num_rails for index in reply.matched):
        raise TransportError(f"a set-up reply matches rails {reply.matched}, {num_rails} were offered")
    if reply.stripe_blocks < 1:
        raise TransportError(f"stripe_blocks is {reply.stripe_blocks} in a set-up reply, must be above 0")


def _check_halves(counts: Sequence[int], what: str) -> None:
    if not counts or any(count != len(CLASSES) for count in counts):
        raise TransportError(
            f"a set-up {what} with {counts} pairs, must be {len(CLASSES)} for each of its devices",
            value=str(counts),
        )


def peer_address(rail: Rail, half: PairOffer) -> PairAddress:
    """What one of our pairs on a matched rail connects to."""
    return PairAddress(gid=rail.their_gid, qp_num=half.qp_num, psn=half.psn, mtu=rail.mtu)
