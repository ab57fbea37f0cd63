"""Every message that crosses the bus, and its codec.

On the wire a message is two bytes, protocol major and minor, then msgpack of a tagged struct. The version stands
before the body, so that a body that an older side could not even parse is still refused with both versions named.
Decoding is strict: a wrong type is refused, never coerced; unknown fields of a newer minor are ignored.

KV bytes never appear here. Token ids, grants and sampling state do.
"""

from distserve.messages.base import (
    FinishReason,
    Message,
    NonNegativeInt,
    Part,
    Phase,
    PositiveInt,
    Role,
    TrafficClass,
    WorkerStatus,
)
from distserve.messages.codec import PROTOCOL_MAJOR, PROTOCOL_MINOR, AnyMessage, ErrorReply, decode, decode_as, encode
from distserve.messages.deployment import (
    ClockReply,
    ClockRequest,
    ProbeGrantRequest,
    ProbeGrants,
    ProbeHello,
    ProbeHost,
)
from distserve.messages.leases import (
    Endpoint,
    KVLayout,
    LeaseGrant,
    LeaseRelease,
    LeaseRequest,
    RemoteRegion,
    SequenceState,
    num_blocks_for,
)
from distserve.messages.links import LinkReply, LinkRequest, PairOffer, RailOffer, RailPairs
from distserve.messages.registry import Load, WorkerInfo
from distserve.messages.sequences import (
    CancelRequest,
    FinishedAck,
    SamplingParams,
    SequenceKey,
    SequenceStatus,
    StatusReply,
    StatusRequest,
    SubmitReply,
    SubmitRequest,
    Timings,
    TokenBatch,
    TokenChunk,
    TokenLogprob,
)

__all__ = [
    "PROTOCOL_MAJOR",
    "PROTOCOL_MINOR",
    "AnyMessage",
    "CancelRequest",
    "ClockReply",
    "ClockRequest",
    "Endpoint",
    "ErrorReply",
    "FinishReason",
    "FinishedAck",
    "KVLayout",
    "LeaseGrant",
    "LeaseRelease",
    "LeaseRequest",
    "LinkReply",
    "LinkRequest",
    "Load",
    "Message",
    "NonNegativeInt",
    "PairOffer",
    "Part",
    "Phase",
    "PositiveInt",
    "ProbeGrantRequest",
    "ProbeGrants",
    "ProbeHello",
    "ProbeHost",
    "RailOffer",
    "RailPairs",
    "RemoteRegion",
    "Role",
    "SamplingParams",
    "SequenceKey",
    "SequenceState",
    "SequenceStatus",
    "StatusReply",
    "StatusRequest",
    "SubmitReply",
    "SubmitRequest",
    "Timings",
    "TokenBatch",
    "TokenChunk",
    "TokenLogprob",
    "TrafficClass",
    "WorkerInfo",
    "WorkerStatus",
    "decode",
    "decode_as",
    "encode",
    "num_blocks_for",
]
