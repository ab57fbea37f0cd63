"""Every message that crosses the bus, and its codec.

On the wire a message is two bytes, protocol major and minor, then msgpack of a tagged struct. The version stands
before the body, so that a body that an older side could not even parse is still refused with both versions named.
Decoding is strict: a wrong type is refused, never coerced; unknown fields of a newer minor are ignored.

KV bytes never appear here. Token ids, grants and sampling state do.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from distserve.errors import DistServeError, Field, MalformedMessage, VersionMismatch, from_wire, to_wire

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0

Role = Literal["gateway", "prefill", "decode", "kvstore"]
WorkerStatus = Literal["warming", "ok", "degraded", "draining"]
FinishReason = Literal["stop", "length", "abort", "error"]
TrafficClass = Literal["decode", "prefill", "background"]
Phase = Literal["queued", "prefill", "handoff", "decode", "finished", "unknown"]

NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of every top-level message: a msgpack map with its class's name under "type"."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A struct that lives inside messages."""


# ---------------------------------------------------------------- sequences


class SequenceKey(msgspec.Struct, frozen=True, array_like=True):
    """Names one sequence everywhere. A resubmission of the same output raises `attempt`; older attempts are void."""

    request_id: str
    output_index: int = 0
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}/{self.output_index}.{self.attempt}"


class SamplingParams(Part, frozen=True):
    """How tokens are drawn. All values are checked by the gateway; `seed` is always set (drawn there if absent)."""

    max_tokens: PositiveInt  # tokens this sequence may still generate in all, counted from num_prompt_tokens
    seed: NonNegativeInt = 0  # 64 bit
    stream: NonNegativeInt = 0  # which of the n outputs of its prompt: equal seeds differ by it (engine/noise.py)
    min_tokens: NonNegativeInt = 0  # eos and stop ids are impossible before this many
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0  # 0: greedy
    top_k: NonNegativeInt = 0  # 0: off
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: NonNegativeInt | None = None  # None: none; n: the chosen token's and the n most likely ones'
    prompt_logprobs: NonNegativeInt | None = None  # the same for every prompt token but the first
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probability of a token under the model's distribution after penalties and before temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), most likely first


class Timings(Part, frozen=True):
    """Where the time went, seconds; each side fills in what it saw."""

    queue_s: float = 0.0  # waiting in the prefill queue
    prefill_s: float = 0.0  # first chunk started -> first token sampled
    transfer_s: float = 0.0  # first token sampled -> lease committed and verified on the decode side
    decode_s: float = 0.0  # adopted -> finished
    kv_bytes: int = 0
    transport: str = ""


class SubmitRequest(Message, frozen=True):
    """Gateway -> worker: compute this sequence. Answered by SubmitReply or ErrorReply.

    To a prefill worker with `decode_worker` set: prefill, sample token 0, hand over. To a decode worker with it
    None: do both phases there (colocated). `token_ids` is the prompt, and, on a resubmission, what was generated
    before; `num_prompt_tokens` tells them apart.
    """

    key: SequenceKey
    model: str
    gateway: str
    token_ids: list[int]
    num_prompt_tokens: PositiveInt
    sampling: SamplingParams
    decode_worker: str | None = None
    traffic_class: TrafficClass = "prefill"
    deadline_s: float | None = None  # relative to receipt


class SubmitReply(Message, frozen=True):
    """Accepted. (Not accepted is an ErrorReply: Overloaded, Draining, InvalidRequest...)"""

    num_waiting: int = 0


class TokenChunk(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence. `start` is the output position of the first (0 = first generated token), so
    doubles can be dropped and gaps seen."""

    key: SequenceKey
    start: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    error: tuple[str, str, dict[str, Field]] | None = None  # errors.to_wire; with finish_reason "error"
    timings: Timings | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # with the chunk whose start is 0
    num_cached_tokens: int = 0  # prompt tokens that were not computed for this sequence


class TokenBatch(Message, frozen=True):
    """Worker -> gateway, one a step: the new tokens of all that gateway's sequences."""

    worker: str
    serial: int  # grows by one for each batch from this worker to this gateway
    chunks: list[TokenChunk]


class StatusRequest(Message, frozen=True):
    """Gateway -> worker: what of these? Each with the number of output tokens it has already."""

    gateway: str
    sequences: list[tuple[SequenceKey, int]]


class SequenceStatus(msgspec.Struct, frozen=True, array_like=True):
    key: SequenceKey
    phase: Phase
    chunk: TokenChunk | None = None  # what the gateway lacks, if anything


class StatusReply(Message, frozen=True):
    sequences: list[SequenceStatus]


class CancelRequest(Message, frozen=True):
    """Gateway -> worker (published): let go of these at once. Idempotent; unknown keys are ignored."""

    keys: list[SequenceKey]
    reason: str = "cancelled"


class FinishedAck(Message, frozen=True):
    """Gateway -> worker (published): it has every token of these; their ids may be forgotten."""

    keys: list[SequenceKey]


# ---------------------------------------------------------------- KV layout and leases


class KVLayout(Part, frozen=True):
    """What the bytes of a block mean. Two sides exchange blocks only if every field is equal (kv/layout.py)."""

    weights: str  # identity of the model's weights (a hash of names, shapes and sampled bytes)
    dtype: str  # "bfloat16" | "float32" | "float16"
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    rope: str  # canonical text of the position encoding's settings
    byte_order: Literal["little"] = "little"


class Endpoint(Part, frozen=True):
    """Where a receiver takes KV by one transport."""

    kind: Literal["shm", "tcp", "rdma", "cuda_ipc"]
    host: str  # who can reach it: for shm the host key (boot id + network namespace), for tcp the address
    address: str  # shm: the socket's name; tcp: "host:port"


class RemoteRegion(Part, frozen=True):
    """What a grant lets its holder write: block i of the lease goes to the receiver's block_ids[i]."""

    lease_id: int
    epoch: int
    endpoint: Endpoint
    block_ids: list[int]
    layout: KVLayout


class LeaseRequest(Message, frozen=True):
    """Prefill -> decode: room for this sequence's prompt. Answered by LeaseGrant or ErrorReply; decode may hold
    the request in its queue for up to `wait_s` before it refuses."""

    key: SequenceKey
    prefill_worker: str
    num_tokens: PositiveInt  # tokens whose KV will be shipped
    layout: KVLayout
    transports: list[str]  # kinds that the asker can write by, preferred first
    host_key: str
    traffic_class: TrafficClass = "prefill"
    wait_s: float = 30.0


class LeaseGrant(Message, frozen=True):
    region: RemoteRegion
    ttl_s: float  # of silence; every write renews it
    num_hit_blocks: int = 0  # leading blocks that the receiver has already; not part of region.block_ids


class LeaseRelease(Message, frozen=True):
    """Prefill -> decode (published): it will write no more under this lease (given up, not committed), or, with
    lease_id 0, it waits no more for the lease that it asked for `key`."""

    key: SequenceKey
    lease_id: int = 0
    epoch: int = 0
    reason: str = ""


class SequenceState(Message, frozen=True):
    """What travels with the commit of a lease: all that decode needs to go on, and all that a later resumption
    needs. KV of token_ids[:num_computed_tokens] is in the lease's blocks."""

    key: SequenceKey
    model: str
    gateway: str
    prefill_worker: str
    token_ids: list[int]  # prompt and what was generated (token 0 included if prefill sampled it)
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling: SamplingParams
    first_logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    last_hidden: bytes = b""  # [hidden_size] of the last prompt token after the final norm, little-endian
    last_hidden_dtype: str = ""
    timings: Timings = Timings()
    sampled_at_unix_s: float = 0.0  # when token 0 was drawn, by the prefill host's clock
    deadline_s: float | None = None  # what is left of it
    num_cached_tokens: int = 0


# ---------------------------------------------------------------- registry


class Load(Part, frozen=True):
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    tokens_per_s: float = 0.0


class WorkerInfo(Message, frozen=True):
    """A service's entry in the registry, renewed by every heartbeat."""

    worker_id: str
    role: Role
    model: str = ""  # served name
    status: WorkerStatus = "warming"
    reasons: list[str] = []  # why it is degraded
    version: str = ""
    host_key: str = ""
    pid: int = 0
    layout: KVLayout | None = None
    endpoints: list[Endpoint] = []
    max_model_len: int = 0  # tokens, prompt and output together
    eos_token_ids: list[int] = []
    colocated: bool = False  # a decode worker that takes SubmitRequest
    load: Load = Load()
    beat: int = 0


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
    | LeaseRequest
    | LeaseGrant
    | LeaseRelease
    | SequenceState
    | WorkerInfo
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


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold num_tokens tokens."""
    return -(-num_tokens // block_size)
