"""Which port of one host talks to which port of another, and by which GIDs: both ends offer what they have and come
to the same answer, each for itself. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from distserve.errors import MalformedMessage
from distserve.messages import RailOffer
from distserve.transport.rdma.addresses import Address


class Rail(msgspec.Struct, frozen=True):
    """One of our ports and one of theirs that talk to each other. mtu: bytes, the smaller of both."""

    index: int  # ours
    gid_index: int  # in our port's table
    their_index: int
    their_gid: str
    mtu: int


Subnet = tuple[Address, int]  # an address and its prefix length, 0 if not known


def address_of(gid: str) -> Address:
    """The IP address that a RoCE v2 GID stands for (annex A17 of the InfiniBand specification): IPv4 if it is
    IPv4-mapped (RFC 4291, 2.5.5.2). Raises ValueError."""
    address = ipaddress.IPv6Address(gid)
    return address.ipv4_mapped or address


def preference(address: Address) -> int:
    """0 IPv4, 1 global IPv6, 2 link-local: what is routable and what networks are set up for comes first."""
    return 0 if address.version == 4 else 2 if address.is_link_local else 1


def in_one_subnet(a: Subnet, b: Subnet) -> bool:
    """Whether two addresses are in one IP subnet, as far as the prefix lengths tell: each must be in the other's.
    An address is with itself; other link-local ones never are: they share a prefix on whatever network they are."""
    if a[0] == b[0]:
        return True
    if a[0].version != b[0].version or preference(a[0]) == 2 or preference(b[0]) == 2:
        return False
    lengths = [length for _, length in (a, b) if length]
    differing_bits = (int(a[0]) ^ int(b[0])).bit_length()
    return bool(lengths) and differing_bits <= a[0].max_prefixlen - max(lengths)


def match_rails(ours: Sequence[RailOffer], theirs: Sequence[RailOffer]) -> list[Rail]:
    """Pairs ports of both hosts, each at most once, by our index. Two ports fit if they have GIDs of one kind: both
    IPv4, both global IPv6 or both link-local, in this order of preference. Those with an IP subnet in common are
    paired first, and if there are any, only those: a port without may have no path at all. Otherwise equal
    positions are paired. The other end, with the arguments swapped, comes to the same pairs and GIDs.

    Empty if nothing fits. Raises MalformedMessage for a GID that is none.
    """
    edges = sorted(_edges(ours, theirs))
    only_shared = bool(edges) and not edges[0].is_apart
    rails: list[Rail] = []
    our_used: set[int] = set()
    their_used: set[int] = set()
    for edge in edges:
        i, j = edge.positions
        if i in our_used or j in their_used or (edge.is_apart and only_shared):
            continue
        our_used.add(i)
        their_used.add(j)
        rails.append(
            Rail(
                index=ours[i].index,
                gid_index=edge.ours.gid_index,
                their_index=theirs[j].index,
                their_gid=edge.theirs.gid,
                mtu=min(ours[i].mtu, theirs[j].mtu),
            )
        )
    return sorted(rails, key=lambda rail: (rail.index, rail.their_index))


class _End(NamedTuple):
    gid: str
    gid_index: int
    port: int


class _Edge(NamedTuple):
    """Two GIDs that can talk, compared best first. All before `positions` is the same seen from the other end, and so
    is the order: edges that are equal up to there join the same two ends the other way round, and either share no
    port, or come after the edge that joins the first end to its like."""

    is_apart: bool  # no IP subnet in common
    preference: int
    distance: int  # between the positions
    first: int  # the smaller position
    ends: tuple[_End, ...]  # sorted
    positions: tuple[int, int]  # ours, theirs
    ours: _End
    theirs: _End


def _edges(ours: Sequence[RailOffer], theirs: Sequence[RailOffer]) -> Iterator[_Edge]:
    for (i, our), (j, their) in product(enumerate(ours), enumerate(theirs)):
        for (our_index, our_gid, our_length), (their_index, their_gid, their_length) in product(our.gids, their.gids):
            a, b = _parse(our_gid), _parse(their_gid)
            if preference(a) != preference(b):
                continue
            mine, other = _End(our_gid, our_index, our.index), _End(their_gid, their_index, their.index)
            is_apart = not in_one_subnet((a, our_length), (b, their_length))
            ends = tuple(sorted((mine, other)))
            yield _Edge(is_apart, preference(a), abs(i - j), min(i, j), ends, (i, j), mine, other)


def _parse(gid: str) -> Address:
    try:
        return address_of(gid)
    except ValueError:
        raise MalformedMessage(
            f"gid is {gid!r}, must be eight groups of four hexadecimal digits",
            field="gid",
            value=gid,
            expected="0000:0000:0000:0000:0000:ffff:0a4d:0001",
        ) from None
