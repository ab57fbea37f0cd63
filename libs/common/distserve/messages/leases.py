"""KV layout, leases on blocks, and the state that travels with a commit."""

from typing import Literal

from distserve.messages.base import Message, NonNegativeInt, Part, PositiveInt, TrafficClass
from distserve.messages.sequences import SamplingParams, SequenceKey, Slo, Timings, TokenLogprob


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
    host: str  # who can reach it: for shm and rdma the host key (boot id + network namespace), for tcp the address
    address: str  # shm: the socket's name; tcp: "host:port"; rdma: a name to connect to over the bus


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
    transports: list[str]  # kinds that the asker can write by
    host_key: str
    traffic_class: TrafficClass = "prefill"
    wait_s: float = 30.0
    slo: Slo = Slo()
    max_new_tokens: NonNegativeInt = 0  # that it may generate yet, for decode to foresee its growth; 0: not said
    hashes: bytes = b""  # of the full blocks, packed: those that decode has already need not be shipped


class LeaseGrant(Message, frozen=True):
    region: RemoteRegion
    ttl_s: float  # of silence; every write renews it
    num_hit_blocks: int = 0  # leading blocks that the receiver has already; not part of region.block_ids
    reason: str = ""  # why by this transport


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
    slo: Slo = Slo()
    num_cached_tokens: int = 0
    cache_salt: str | None = None  # None: of a side that knows none; nothing of it is shared then
    conversation: str = ""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold num_tokens tokens."""
    return -(-num_tokens // block_size)
