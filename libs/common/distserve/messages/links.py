"""Setting up RDMA links (transport/rdma/connect.py)."""

from distserve.messages.base import Message, Part
from distserve.messages.leases import KVLayout


class RailOffer(Part, frozen=True):
    """One RDMA device of a side and the ways to reach it: (GID index, GID, length of its subnet's prefix or 0). mtu:
    the port's, bytes."""

    index: int  # among that side's devices
    gids: tuple[tuple[int, str, int], ...]
    mtu: int


class PairOffer(Part, frozen=True):
    """One side's half of a queue pair."""

    qp_num: int
    psn: int  # of its first packet


class RailPairs(Part, frozen=True):
    """A device and its pairs, one for each traffic class."""

    rail: RailOffer
    pairs: list[PairOffer]


class LinkRequest(Message, frozen=True):
    """Sender -> receiver. `instance` names the sender's process, `epoch` counts its links to this receiver: a later
    one takes the place of an earlier one, and may open its leases again. Answered by LinkReply, LayoutMismatch,
    TransportUnavailable."""

    sender_id: str
    instance: str
    epoch: int
    layout: KVLayout
    rails: list[RailPairs]


class LinkReply(Message, frozen=True):
    """The receiver's half: rails[i] is to be connected with the request's rails[matched[i]]."""

    layout: KVLayout
    matched: list[int]
    rails: list[RailPairs]
    stripe_blocks: int  # so many consecutive blocks of a lease go by one rail, the next by another
