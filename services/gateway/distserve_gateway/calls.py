"""A request after validation: what both doors, HTTP and NATS, hand to the pipeline."""

from dataclasses import dataclass, field
from typing import Literal

from distserve.messages import SamplingParams, TrafficClass

Kind = Literal["chat", "completion", "generate"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `max_tokens` may be 0 (echo only): then no output is kept, whatever `sampling` says."""

    token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    text: str | None = None  # as the user wrote it; None if the prompt came as ids


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

    @property
    def num_outputs(self) -> int:
        return self.n * len(self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def needs_worker(self) -> bool:
        """An echo without logprobs of no tokens is answered without the model."""
        return self.num_logprobs is not None or any(prompt.max_tokens for prompt in self.prompts)
