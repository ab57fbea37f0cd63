"""Looking at a deployment (`distserve doctor`)."""

from distserve.messages.base import Message, PositiveInt
from distserve.messages.leases import RemoteRegion


class ClockRequest(Message, frozen=True):
    """Anyone -> any service: what time is it there? Answered by ClockReply."""


class ClockReply(Message, frozen=True):
    """By the answerer's wall clock, nanoseconds of Unix time: T2 and T3 of RFC 5905's four timestamps."""

    received_unix_ns: int
    sent_unix_ns: int


class ProbeHello(Message, frozen=True):
    """`distserve doctor --peer` -> `distserve doctor --serve`: who are you? Answered by ProbeHost."""


class ProbeHost(Message, frozen=True):
    """A host that takes scratch leases. `pools` names each scratch pool's number of blocks, `kinds` the transports that
    it takes them by."""

    serve_id: str  # its own subject from here on: several may answer under one host's name
    host: str
    host_key: str
    version: str
    kinds: list[str]
    unusable: dict[str, str]  # kind -> why it can't be used there
    pools: dict[str, int]


class ProbeGrantRequest(Message, frozen=True):
    """Scratch leases of num_blocks blocks each. Those granted before on the same pool and transport are void: their
    blocks are used again. Answered by ProbeGrants; by Overloaded while another asker (`asker`) is measuring."""

    asker: str
    kind: str
    pool: str
    num_leases: PositiveInt
    num_blocks: PositiveInt


class ProbeGrants(Message, frozen=True):
    regions: list[RemoteRegion]
