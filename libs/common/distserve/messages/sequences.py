"""Sequences: submitting them, their tokens, asking after them, ending them."""

from typing import Annotated

import msgspec

from distserve.errors import Field
from distserve.messages.base import (
    FinishReason,
    Message,
    NonNegativeInt,
    Part,
    Phase,
    PositiveInt,
    Priority,
    TrafficClass,
)


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


Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]  # finite: a number that clocks can be set against
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Slo(Part, frozen=True):
    """What a sequence was promised. None: nothing was, and it waits as long as its class must."""

    priority: Priority = "normal"
    ttft_s: Seconds | None = None  # until its first token is due, from the message's receipt; negative: it is late
    tpot_s: PositiveSeconds | None = None  # mean time of a token after the first, at most


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
    traffic_class: str = ""


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
    cache_salt: str = ""  # enters the hash chain: blocks are shared among equal salts only
    conversation: str = ""  # what the user calls it (session_id, else user): for affinity, pins and deletion
    slo: Slo = Slo()
    may_queue: bool = False  # to a decode worker: no prefill worker can take it, so it may be long and may wait there
    holder: str = ""  # decode worker that seems to hold the longest prefix: it may be fetched from there


class SubmitReply(Message, frozen=True):
    """Accepted. (Not accepted is an ErrorReply: Overloaded, SloUnattainable, Draining, InvalidRequest...)"""

    num_waiting: int = 0
    ttft_s: float | None = None  # until its first token, as the worker predicts it; None: it can't tell yet


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
