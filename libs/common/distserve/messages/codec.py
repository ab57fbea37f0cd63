"""The version on the wire, encoding and decoding."""

from typing import Any, TypeVar

import msgspec

from distserve.errors import DistServeError, Field, MalformedMessage, VersionMismatch, from_wire, to_wire
from distserve.messages.base import Message
from distserve.messages.deployment import (
    ClockReply,
    ClockRequest,
    ProbeGrantRequest,
    ProbeGrants,
    ProbeHello,
    ProbeHost,
)
from distserve.messages.leases import LeaseGrant, LeaseRelease, LeaseRequest, SequenceState
from distserve.messages.links import LinkReply, LinkRequest
from distserve.messages.observing import ReportReply, ReportRequest, TracesKept
from distserve.messages.registry import WorkerInfo
from distserve.messages.sequences import (
    CancelRequest,
    FinishedAck,
    StatusReply,
    StatusRequest,
    SubmitReply,
    SubmitRequest,
    TokenBatch,
)
from distserve.messages.stopping import StopReply, StopRequest
from distserve.messages.store import (
    BlocksReleased,
    DeleteRequest,
    FetchedState,
    FetchReply,
    FetchRequest,
    KVEvents,
    KVSnapshot,
    KVSnapshotRequest,
    OfferedState,
    OfferGrant,
    OfferReleased,
    OfferRequest,
    PinRequest,
    PrefixReply,
    PrefixRequest,
    StoreDone,
    StoreList,
    StoreListRequest,
    StorePruneRequest,
    StoreStats,
    StoreStatsRequest,
    StoreVerified,
    StoreVerifyRequest,
    TouchRequest,
    UnpinRequest,
)

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 3


class ErrorReply(Message, frozen=True):
    """The answer to any request that failed; the asker's bus raises it as the exception it stands for."""

    code: str
    message: str
    fields: dict[str, Field] = {}

    @classmethod
    def of(cls, error: BaseException) -> "ErrorReply":
        code, message, fields = to_wire(error)
        return cls(code=code, message=message, fields=fields)

    def exception(self) -> DistServeError:
        return from_wire(self.code, self.message, self.fields)


AnyMessage = (
    SubmitRequest
    | SubmitReply
    | TokenBatch
    | StatusRequest
    | StatusReply
    | CancelRequest
    | FinishedAck
    | StopRequest
    | StopReply
    | ReportRequest
    | ReportReply
    | TracesKept
    | LeaseRequest
    | LeaseGrant
    | LeaseRelease
    | SequenceState
    | WorkerInfo
    | ClockRequest
    | ClockReply
    | ProbeHello
    | ProbeHost
    | ProbeGrantRequest
    | ProbeGrants
    | LinkRequest
    | LinkReply
    | PrefixRequest
    | PrefixReply
    | BlocksReleased
    | FetchRequest
    | FetchReply
    | FetchedState
    | OfferRequest
    | OfferGrant
    | OfferedState
    | OfferReleased
    | TouchRequest
    | PinRequest
    | UnpinRequest
    | DeleteRequest
    | StoreDone
    | StoreStatsRequest
    | StoreStats
    | StoreListRequest
    | StoreList
    | StorePruneRequest
    | StoreVerifyRequest
    | StoreVerified
    | KVEvents
    | KVSnapshotRequest
    | KVSnapshot
    | ErrorReply
)
M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)
_HEADER = bytes([PROTOCOL_MAJOR, PROTOCOL_MINOR])


def encode(message: Message) -> bytes:
    """Bytes of a message, ready to publish."""
    buffer = bytearray(_HEADER)
    _encoder.encode_into(message, buffer, len(_HEADER))
    return bytes(buffer)


def decode(data: bytes | memoryview) -> Any:
    """The message that `data` holds.

    Raises VersionMismatch for an unknown major and MalformedMessage for anything else that is not a message.
    """
    if len(data) < len(_HEADER):
        raise MalformedMessage(
            f"a message has at least {len(_HEADER)} bytes, this one {len(data)}", size_bytes=len(data)
        )
    if data[0] != PROTOCOL_MAJOR:
        raise VersionMismatch(
            f"the message speaks protocol {data[0]}.{data[1]}, this side {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: "
            "run the same release on both",
            theirs=f"{data[0]}.{data[1]}",
            ours=f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
        )
    try:
        return _decoder.decode(memoryview(data)[len(_HEADER) :])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as e:
        raise MalformedMessage(f"the body is not a message of protocol {PROTOCOL_MAJOR}: {e}") from e


def decode_as(kind: type[M], data: bytes | memoryview) -> M:
    """`decode`, with the kind checked. An ErrorReply is raised as the exception it stands for."""
    message = decode(data)
    if isinstance(message, ErrorReply) and kind is not ErrorReply:
        raise message.exception()
    if not isinstance(message, kind):
        raise MalformedMessage(f"expected {kind.__name__}, got {type(message).__name__}", expected=kind.__name__)
    return message
