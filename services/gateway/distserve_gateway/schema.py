"""What a request's body may hold. Decoding is strict: a boolean is no number, a number no string.

null means absent, as OpenAI's clients send it. Fields that are not here are in `unsupported.py`, or ignored.
"""

from typing import Annotated, Any, TypeVar, get_args

import msgspec

from distserve.api_keys import PRIORITIES
from distserve.messages import TrafficClass

TRAFFIC_CLASSES: tuple[str, ...] = get_args(TrafficClass)


class Body(msgspec.Struct, kw_only=True):
    """Base of every request body."""

    model: str | None = None  # the one that is served, if absent


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SampledBody(Body):
    """What completions, chat and /generate share."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    session_id: Annotated[
        str | None,
        msgspec.Meta(
            description="Requests of one conversation go to the same workers. Default: X-Session-Id, or user."
        ),
    ] = None
    cache_salt: Annotated[
        str | None,
        msgspec.Meta(description="Prefixes are shared only among requests with the same one. As vLLM's."),
    ] = None
    return_token_ids: bool | None = None  # as vLLM's: ids of prompt and output beside the text
    timings: bool | None = None  # DistServe's own: where the time went, with the usage
    # DistServe's own. Any text as far as the decoder goes: params.py says what is wrong with it.
    traffic_class: Annotated[
        str | None,
        msgspec.Meta(
            description="How the packets of the request's KV are marked on the network. Default: by priority, decode "
            "for vip, prefill for normal, background for batch.",
            extra_json_schema={"enum": [*TRAFFIC_CLASSES, None]},
        ),
    ] = None
    # What it is promised and may use (terms.py). Each has a header too, an API key's default and a setting's.
    priority: Annotated[
        str | int | None,
        msgspec.Meta(
            description="Its class. Default: X-Priority, or the API key's, or normal. 0, as vLLM's clients may send, "
            "says nothing.",
            extra_json_schema={"enum": [*PRIORITIES, 0, None]},
        ),
    ] = None
    ttft_slo_ms: Annotated[
        float | None,
        msgspec.Meta(
            description="First token within so many milliseconds of the request's receipt, or 429 at once. Default: "
            "X-TTFT-SLO-Ms, or the API key's, or slo.ttft_ms."
        ),
    ] = None
    tpot_slo_ms: Annotated[
        float | None,
        msgspec.Meta(
            description="Mean time of a token after the first, in milliseconds. Default: X-TPOT-SLO-Ms, or the API "
            "key's, or slo.tpot_ms."
        ),
    ] = None
    deadline_ms: Annotated[
        float | None,
        msgspec.Meta(
            description="The whole answer within so many milliseconds, or ended. Default: X-Deadline-Ms, or the API "
            "key's, or slo.deadline_ms."
        ),
    ] = None


class CompletionBody(SampledBody):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None


class GenerateBody(SampledBody):
    prompt: str | list[int] | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatBody(SampledBody):
    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: list[int]


B = TypeVar("B", bound=Body)
