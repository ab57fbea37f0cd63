"""The control frames of the rdma transport, carried by sends on a link's control lane.

The header is that of the stream transports (framing.py). All bodies are msgpack arrays but COMMIT's, which is theirs
preceded by the lanes that carried blocks.

    HELLO     sender -> receiver, first: the path works in this direction, for packets of full size. WELCOME is the
              answer
    OPEN      sender -> receiver: this link will write that lease, by the lanes of these traffic classes
    OPENED    receiver -> sender: where the blocks are and with which keys, for each lane; the ticket that the last
              write of every lane carries as its immediate
    COMMIT    sender -> receiver: how many bytes which lanes carried, each block's checksum, the state. May overtake the
              blocks
    ABORT     sender -> receiver: the lease is given up, nothing of it is on its way
    ACK       receiver -> sender: the outcome of COMMIT or ABORT
    LOST      receiver -> sender: the lease is dead; stop writing and say STOPPED
    STOPPED   sender -> receiver: nothing of that lease is on its way any more
    PROGRESS  sender -> receiver: blocks of the lease have been placed, which the receiver cannot see
    PING      either way: nothing; that it arrives is what counts
    BYE       sender -> receiver: it stops for good, as it was told to
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import msgspec

from distserve.errors import TransportError
from distserve.kv.checksum import Words
from distserve.messages import TrafficClass
from distserve.transport import framing
from distserve.transport.framing import Ack, CommitHead, Lost, WireError
from distserve.transport.rdma.buffers import MESSAGE_BYTES

MAGIC = 0x6B72
VERSION = 1
HEADER = framing.HEADER
_LANES = struct.Struct("<H")  # bytes of the lanes' part


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    OPEN = 3
    OPENED = 4
    COMMIT = 5
    ABORT = 6
    ACK = 7
    LOST = 8
    STOPPED = 9
    PROGRESS = 10
    PING = 11
    BYE = 12


class Nothing(msgspec.Struct, frozen=True, array_like=True):
    """Body of PING and BYE."""


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """Body of HELLO and WELCOME. padding: a hop that takes small packets only must not pass for a path."""

    padding: bytes


class LeaseName(msgspec.Struct, frozen=True, array_like=True):
    """Body of STOPPED and PROGRESS."""

    lease_id: int
    epoch: int


class Open(msgspec.Struct, frozen=True, array_like=True):
    lease_id: int
    epoch: int
    traffic_class: TrafficClass


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Blocks first .. first+count-1 of the lease lie one after the other from `address` on; `rkey` opens them."""

    first: int
    count: int
    address: int
    rkey: int


class Opened(msgspec.Struct, frozen=True, array_like=True):
    lease_id: int
    epoch: int
    ticket: int  # 32 bits; names the lease on this link
    runs: dict[int, list[Run]]  # lane -> what it may write


class Abort(msgspec.Struct, frozen=True, array_like=True):
    lease_id: int
    epoch: int
    reason: str
    error: WireError | None = None  # what was wrong with the writer's own work, if that is why


_BODY: dict[Kind, type[msgspec.Struct]] = {
    Kind.HELLO: Greeting,
    Kind.WELCOME: Greeting,
    Kind.OPEN: Open,
    Kind.OPENED: Opened,
    Kind.ABORT: Abort,
    Kind.ACK: Ack,
    Kind.LOST: Lost,
    Kind.STOPPED: LeaseName,
    Kind.PROGRESS: LeaseName,
    Kind.PING: Nothing,
    Kind.BYE: Nothing,
}
_encode = msgspec.msgpack.Encoder().encode
_DECODE_LANES = msgspec.msgpack.Decoder(dict[int, int]).decode
_DECODERS: dict[Kind, msgspec.msgpack.Decoder[Any]] = {k: msgspec.msgpack.Decoder(body) for k, body in _BODY.items()}


class Commit(msgspec.Struct, frozen=True):
    """A decoded COMMIT. lanes: those whose tickets are due before the lease is whole, and the bytes each carried."""

    lanes: dict[int, int]
    head: Any  # framing.CommitHead


def frame(kind: Kind, body: msgspec.Struct | None = None) -> bytes:
    head = _encode(Nothing() if body is None else body)
    return HEADER.pack(MAGIC, kind, VERSION, len(head)) + head


def greeting(kind: Kind) -> bytes:
    """A frame that fills a whole message."""
    return frame(kind, Greeting(bytes(MESSAGE_BYTES - HEADER.size - 4)))


def commit_frame(lease_id: int, epoch: int, lanes: dict[int, int], sums: Words, state: bytes) -> bytes:
    by_lane = _encode(lanes)
    head = _LANES.pack(len(by_lane)) + by_lane
    head += framing.commit_frame(lease_id, epoch, sums, state)[HEADER.size :]
    return HEADER.pack(MAGIC, Kind.COMMIT, VERSION, len(head)) + head


def parse(kind: Kind, head: bytes) -> Any:
    """The decoded body. Raises TransportError."""
    if kind is Kind.COMMIT:
        if len(head) < _LANES.size:
            raise TransportError(f"a COMMIT of {len(head)} bytes")
        stop = _LANES.size + _LANES.unpack_from(head)[0]
    try:
        if kind is Kind.COMMIT:
            lanes = _DECODE_LANES(head[_LANES.size : stop])
            commit: CommitHead = framing.parse_commit(memoryview(head)[stop:])
            return Commit(lanes, commit)
        return _DECODERS[kind].decode(head)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as e:
        raise TransportError(f"malformed {kind.name} frame: {e}") from e


class Frames:
    """Frames out of messages that carry them in pieces, in order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[Kind, Any]]:
        """The frames that are complete now. Raises TransportError for garbage."""
        self._pending += data
        frames: list[tuple[Kind, Any]] = []
        start = 0
        while len(self._pending) - start >= HEADER.size:
            magic, number, version, length = HEADER.unpack_from(self._pending, start)
            if magic != MAGIC or version != VERSION:
                raise TransportError(
                    f"the peer speaks another protocol (magic {magic:#06x}, version {version}; here {MAGIC:#06x}, "
                    f"{VERSION}): run the same release on both"
                )
            if length > self._limit:
                raise TransportError(f"a frame of {length} bytes, the limit is {self._limit}", size_bytes=length)
            stop = start + HEADER.size + length
            if len(self._pending) < stop:
                break
            try:
                kind = Kind(number)
            except ValueError:
                raise TransportError(f"unknown frame type {number}", value=number) from None
            frames.append((kind, parse(kind, bytes(self._pending[start + HEADER.size : stop]))))
            start = stop
        del self._pending[:start]
        return frames
