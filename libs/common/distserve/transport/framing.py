"""The wire protocol of the stream transports: pure encoding, apart from I/O.

A connection runs from a sender to a receiver and serves many leases. Every frame is an 8-byte header, then a head
of `length` bytes; over tcp a WRITE's head is followed by its payload, whose size follows from the head.

    header   magic u16 | type u8 | version u8 | length u32           (little-endian, as everything)
    HELLO    sender -> receiver, first: who, which class, the full layout; over shm with the pool's memfd
    WELCOME  receiver -> sender: its own layout. Or REFUSED: an error, then the connection ends
    OPEN     sender -> receiver: this connection will write that lease
    WRITE    layers [start, stop) of runs of a lease's blocks, and where these lie in the sender's pool (for shm)
    COMMIT   each block's checksum, and the state
    ABORT    the sender gives the lease up
    ACK      receiver -> sender: the outcome of a COMMIT or ABORT; it reads the sender's blocks no more
    LOST     receiver -> sender, unasked: the lease is dead, stop writing; it reads the sender's blocks no more
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from distserve.errors import DistServeError, Field, TransportError, from_wire, to_wire
from distserve.kv.checksum import Words
from distserve.messages import KVLayout, TrafficClass
from distserve.transport.spans import Run

MAGIC = 0x6B76
VERSION = 2
HEADER = struct.Struct("<HBBI")
_WRITE = struct.Struct("<QQHHI")  # lease_id, epoch, layer_start, layer_stop, num_runs
_RUN = struct.Struct("<III")  # first target, first source, count
_COMMIT = struct.Struct("<QQII")  # lease_id, epoch, num_blocks, state_bytes


class FrameType(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    OPEN = 4
    WRITE = 5
    COMMIT = 6
    ABORT = 7
    ACK = 8
    LOST = 9


WireError = tuple[str, str, dict[str, Field]]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    sender_id: str
    traffic_class: TrafficClass
    layout: KVLayout
    num_blocks: int  # of the sender's pool; what the memfd holds
    pool: bytes = b""  # over cuda_ipc: how to get at it (ipc_memory.py)


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    layout: KVLayout


class Refused(msgspec.Struct, frozen=True, array_like=True):
    error: WireError


class LeaseRef(msgspec.Struct, frozen=True, array_like=True):
    """Body of OPEN and ABORT."""

    lease_id: int
    epoch: int
    reason: str = ""


class Ack(msgspec.Struct, frozen=True, array_like=True):
    lease_id: int
    epoch: int
    verb: Literal["commit", "abort"]
    num_bytes: int = 0
    error: WireError | None = None


class Lost(msgspec.Struct, frozen=True, array_like=True):
    lease_id: int
    epoch: int
    error: WireError


@dataclass(frozen=True, slots=True)
class WriteHead:
    """Targets are positions in the lease's block list, sources block ids in the sender's pool. As they came: nothing
    is checked yet."""

    lease_id: int
    epoch: int
    layer_start: int
    layer_stop: int
    runs: list[Run]

    @property
    def num_layer_blocks(self) -> int:
        return max(0, self.layer_stop - self.layer_start) * sum(count for _, _, count in self.runs)


@dataclass(frozen=True, slots=True)
class CommitHead:
    lease_id: int
    epoch: int
    sums: Words
    state: bytes


_BODY: dict[FrameType, type[msgspec.Struct]] = {
    FrameType.HELLO: Hello,
    FrameType.WELCOME: Welcome,
    FrameType.REFUSED: Refused,
    FrameType.OPEN: LeaseRef,
    FrameType.ABORT: LeaseRef,
    FrameType.ACK: Ack,
    FrameType.LOST: Lost,
}
_TYPES: dict[int, FrameType] = {int(kind): kind for kind in FrameType}  # a call of the enum costs more
_encode = msgspec.msgpack.Encoder().encode
_DECODERS: dict[FrameType, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(body) for kind, body in _BODY.items()
}
B = TypeVar("B", bound=msgspec.Struct)


def frame(kind: FrameType, body: msgspec.Struct) -> bytes:
    head = _encode(body)
    return HEADER.pack(MAGIC, kind, VERSION, len(head)) + head


def write_frame(lease_id: int, epoch: int, layer_start: int, layer_stop: int, runs: Sequence[Run]) -> bytes:
    head = _WRITE.pack(lease_id, epoch, layer_start, layer_stop, len(runs))
    body = b"".join([_RUN.pack(*run) for run in runs])
    return HEADER.pack(MAGIC, FrameType.WRITE, VERSION, len(head) + len(body)) + head + body


def commit_frame(lease_id: int, epoch: int, sums: Words, state: bytes) -> bytes:
    head = _COMMIT.pack(lease_id, epoch, len(sums), len(state))
    length = len(head) + 8 * len(sums) + len(state)
    return HEADER.pack(MAGIC, FrameType.COMMIT, VERSION, length) + head + sums.astype("<u8").tobytes() + state


def parse_header(data: bytes | bytearray | memoryview, limit: int) -> tuple[FrameType, int]:
    """(type, length of the head). Raises TransportError for what is no frame, another version or too long."""
    magic, kind, version, length = HEADER.unpack(data)
    if magic != MAGIC:
        raise TransportError(f"the peer does not speak this protocol: magic {magic:#06x}, expected {MAGIC:#06x}")
    if version != VERSION:
        raise TransportError(
            f"the peer speaks version {version} of the KV protocol, this side {VERSION}: run the same release on both",
            theirs=version,
            ours=VERSION,
        )
    frame_type = _TYPES.get(kind)
    if frame_type is None:
        raise TransportError(f"unknown frame type {kind}", value=kind)
    if length > limit:
        raise TransportError(f"a {frame_type.name} frame of {length} bytes, the limit is {limit}", size_bytes=length)
    return frame_type, length


def parse_body(kind: FrameType, head: bytes | bytearray | memoryview, body: type[B]) -> B:
    """The decoded body of a frame, checked to be a `body`. Raises TransportError."""
    if _BODY.get(kind) is not body:
        raise TransportError(f"a {kind.name} frame where one of {body.__name__} was due", value=kind.name)
    try:
        decoded: B = _DECODERS[kind].decode(head)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as e:
        raise TransportError(f"malformed {kind.name} frame: {e}") from e
    return decoded


def parse_write(head: bytes | bytearray | memoryview) -> WriteHead:
    if len(head) < _WRITE.size:
        raise TransportError(f"a WRITE head of {len(head)} bytes, at least {_WRITE.size} were due")
    lease_id, epoch, layer_start, layer_stop, num_runs = _WRITE.unpack_from(head)
    if len(head) != _WRITE.size + _RUN.size * num_runs:
        raise TransportError(f"a WRITE head of {len(head)} bytes for {num_runs} runs")
    return WriteHead(lease_id, epoch, layer_start, layer_stop, list(_RUN.iter_unpack(head[_WRITE.size :])))


def parse_commit(head: bytes | bytearray | memoryview) -> CommitHead:
    if len(head) < _COMMIT.size:
        raise TransportError(f"a COMMIT head of {len(head)} bytes, at least {_COMMIT.size} were due")
    lease_id, epoch, num_blocks, state_bytes = _COMMIT.unpack_from(head)
    state_at = _COMMIT.size + 8 * num_blocks
    if len(head) != state_at + state_bytes:
        raise TransportError(f"a COMMIT head of {len(head)} bytes for {num_blocks} blocks and {state_bytes} of state")
    sums = np.frombuffer(head, dtype="<u8", count=num_blocks, offset=_COMMIT.size).astype(np.uint64)
    return CommitHead(lease_id, epoch, sums, bytes(memoryview(head)[state_at:]))


def error_of(error: WireError) -> DistServeError:
    return from_wire(*error)


def wire_error(error: BaseException) -> WireError:
    return to_wire(error)


class FrameReader:
    """Frames out of a byte stream, fed as it comes. For the sender's side, where frames carry no payload."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[FrameType, bytes]]:
        """The frames that are complete now. Raises TransportError for garbage."""
        self._pending += data
        frames: list[tuple[FrameType, bytes]] = []
        start = 0
        while len(self._pending) - start >= HEADER.size:
            kind, length = parse_header(self._pending[start : start + HEADER.size], self._limit)
            stop = start + HEADER.size + length
            if len(self._pending) < stop:
                break
            frames.append((kind, bytes(self._pending[start + HEADER.size : stop])))
            start = stop
        del self._pending[:start]
        return frames
