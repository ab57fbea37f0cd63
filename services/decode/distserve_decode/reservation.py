"""A request for room on this worker: what it comes to, and what it has been given."""

import asyncio
import time
from dataclasses import dataclass, field

from distserve.errors import InvalidRequest
from distserve.kv.hashing import unpack
from distserve.messages import LeaseGrant, LeaseRequest, SequenceKey, num_blocks_for
from distserve.telemetry import NO_SPAN, Span
from distserve.transport.base import Lease, Receiver
from distserve.transport.select import Choice


@dataclass(slots=True, eq=False)
class Reservation:
    """A granted lease, and all blocks that are its sequence's if it is committed:

    blocks   |<- prefix hits -->|<- lease.block_ids: exposed ->|<- room for the first output ->|
             |<- hit_names ---->|
    """

    key: SequenceKey
    lease: Lease
    blocks: list[int]
    hit_names: list[bytes]
    receiver: Receiver
    choice: Choice
    num_growth_blocks: int = 0  # that it is expected to take beyond those
    granted_at: float = field(default_factory=time.monotonic)
    asker: Span = NO_SPAN  # the hand-over's


@dataclass(frozen=True, slots=True)
class Ask:
    """blocks: for all of the prompt. names: of its beginning's blocks, which need not be sent if they are here; never
    of the last block, so that a lease has one at least. asker: the span of the hand-over that asks."""

    request: LeaseRequest
    blocks: int
    names: list[bytes]
    choice: Choice
    asker: Span = NO_SPAN


@dataclass(slots=True, eq=False)
class Waiter:
    ask: Ask
    granted: "asyncio.Future[LeaseGrant]"
    num_overtaken: int = 0  # grants to others that came later

    @property
    def request(self) -> LeaseRequest:
        return self.ask.request


def blocks_and_names(request: LeaseRequest, block_size: int) -> tuple[int, list[bytes]]:
    """As in an Ask. Raises InvalidRequest for a name that is there twice, KVError for half a one."""
    blocks = num_blocks_for(request.num_tokens, block_size)
    names = unpack(request.hashes)[: blocks - 1]
    if len(set(names)) < len(names):
        raise InvalidRequest(
            f"hashes of {request.key} names {len(names)} blocks, {len(names) - len(set(names))} of them twice, must be "
            "those of a chain: all different",
            param="hashes",
        )
    return blocks, names
