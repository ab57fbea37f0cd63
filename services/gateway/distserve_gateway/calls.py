"""A request after validation: what both doors, HTTP and NATS, hand to the pipeline."""

import time
from dataclasses import dataclass, field
from typing import Literal

from distserve.messages import Priority, SamplingParams, TrafficClass
from distserve_gateway.request_trace import NO_TRACE, RequestTrace

Kind = Literal["chat", "completion", "generate"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `max_tokens` may be 0 (echo only): then no output is kept, whatever `sampling` says."""

    token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    text: str | None = None  # as the user wrote it; None if the prompt came as ids


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request is promised and may use: its own words, else its API key's, else the configuration's."""

    priority: Priority = "normal"
    ttft_s: float | None = None  # from the request's receipt
    tpot_s: float | None = None
    deadline_s: float | None = None  # for the whole answer; None: the gateway's limit
    tenant: str = ""  # name of the API key; empty: open to everybody


@dataclass(frozen=True, slots=True)
class Call:
    """`n` outputs of each prompt; choice i is of prompt i // n."""

    request_id: str  # also the answer's `id`
    kind: Kind
    model: str
    created: int  # Unix time, s
    prompts: list[Prompt]
    n: int = 1
    stops: tuple[str, ...] = ()
    num_logprobs: int | None = None  # None: none wanted; 0: the chosen token's only
    echo: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    timings: bool = False
    token_ids: bool = False  # return them
    traffic_class: TrafficClass = "prefill"
    cache_salt: str = field(default="", repr=False)  # a secret (identity.py)
    conversation: str = ""
    terms: Terms = Terms()
    received_at: float = field(default_factory=time.monotonic)  # whole, before it was looked at
    trace: RequestTrace = field(default=NO_TRACE, repr=False, compare=False)

    @property
    def num_outputs(self) -> int:
        return self.n * len(self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def max_output_tokens(self) -> int:
        return self.n * sum(prompt.max_tokens for prompt in self.prompts)

    @property
    def needs_worker(self) -> bool:
        """An echo without logprobs of no tokens is answered without the model."""
        return self.num_logprobs is not None or any(prompt.max_tokens for prompt in self.prompts)
