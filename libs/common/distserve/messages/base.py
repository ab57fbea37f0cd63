"""What every message is made of."""

from typing import Annotated, Literal

import msgspec

Role = Literal["gateway", "prefill", "decode", "kvstore"]
WorkerStatus = Literal["warming", "ok", "degraded", "draining"]
FinishReason = Literal["stop", "length", "abort", "error"]
TrafficClass = Literal["decode", "prefill", "background"]
Priority = Literal["vip", "normal", "batch"]
Phase = Literal["queued", "prefill", "handoff", "decode", "finished", "unknown"]

NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of every top-level message: a msgpack map with its class's name under "type"."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A struct that lives inside messages."""
