"""What the fallback server is asked for: OpenAI's API, always streamed, with usage."""

import hashlib
from dataclasses import replace
from typing import Any

import msgspec

from distserve_gateway.calls import Call, Kind

COMPLETIONS = "/v1/completions"
PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": COMPLETIONS, "generate": COMPLETIONS}

# DistServe's own, and `echo`, which is done here.
NOT_PASSED = (
    "deadline_ms",
    "echo",
    "priority",
    "session_id",
    "timings",
    "tpot_slo_ms",
    "traffic_class",
    "ttft_slo_ms",
)


def fits(call: Call) -> bool:
    """Whether the fallback can give what is asked for: not the logprobs of a prompt, in the place where they belong."""
    return call.needs_worker and not (call.echo and call.num_logprobs is not None)


def passed_on(call: Call, body: bytes, model: str) -> bytes:
    """The client's own request: its fields as they came, but for NOT_PASSED, the model's name and the frame."""
    fields: dict[str, Any] = dict(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    for name in NOT_PASSED:
        fields.pop(name, None)
    return msgspec.json.encode(fields | _frame(call, model))


def handed_on(call: Call, drawn: list[int], model: str) -> bytes:
    """The rest of a call of one output, of which the tokens `drawn` are there: as ids, and ids are to come back.

    All that decides about tokens is named, so that no default of the fallback's counts. Stop strings are not: they are
    looked for here, where the whole text is.
    """
    [prompt] = call.prompts
    sampling = prompt.sampling
    fields: dict[str, Any] = {
        "prompt": prompt.token_ids + drawn,
        "max_tokens": prompt.max_tokens - len(drawn),
        "min_tokens": max(0, sampling.min_tokens - len(drawn)),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": _signed(sampling.seed),
        "ignore_eos": sampling.ignore_eos,
        "return_token_ids": True,
    }
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    return msgspec.json.encode(fields | _frame(call, model))


def first_token_only(call: Call) -> Call:
    """The part of such a call that is done here."""
    [prompt] = call.prompts
    sampling = msgspec.structs.replace(prompt.sampling, max_tokens=1, min_tokens=min(prompt.sampling.min_tokens, 1))
    return replace(call, prompts=[replace(prompt, sampling=sampling)])


def _frame(call: Call, model: str) -> dict[str, Any]:
    options = {"include_usage": True}
    if call.continuous_usage:
        options["continuous_usage_stats"] = True
    frame: dict[str, Any] = {"model": model, "stream": True, "stream_options": options}
    if call.cache_salt:  # with the tenant in it: no more is shared there than here; hashed, since servers restrict it
        frame["cache_salt"] = hashlib.sha256(call.cache_salt.encode()).hexdigest()
    return frame


def _signed(seed: int) -> int:
    """The same 64 bits, as servers take them that have no other."""
    return seed - 2**64 if seed >= 2**63 else seed
