"""Fields that other servers understand and this one does not (yet): refused when they would change the answer.

Ignoring them would be an answer to another question than the one that was asked.
"""

import functools
from typing import Any

import msgspec

from distserve.errors import UnsupportedFeature
from distserve_gateway.schema import Body, ChatBody, CompletionBody, GenerateBody

# Field -> values that ask for nothing; null always does.
_ALL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (),  # `n` is checked where both are known
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_request": (),
    "prompt_embeds": ([],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": ({},),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_TEXT: dict[str, tuple[Any, ...]] = {"suffix": ("",)}
_FIELDS: dict[type[Body], dict[str, tuple[Any, ...]]] = {
    ChatBody: _ALL | _CHAT,
    CompletionBody: _ALL | _TEXT,
    GenerateBody: _ALL | _TEXT | {"echo": (False,), "logprobs": ()},
}


@functools.cache
def _decoder(kind: type[Body]) -> "msgspec.json.Decoder[Any]":
    fields = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in _FIELDS[kind]]
    # `n` and `prompt`-like fields are skipped by the parser, so this costs little on a long prompt.
    fields.append(("n", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET))
    return msgspec.json.Decoder(msgspec.defstruct(f"{kind.__name__}Unsupported", fields))


def refuse_unsupported(kind: type[Body], data: bytes) -> None:
    """Raises UnsupportedFeature naming the first field that asks for what does not exist. `data` is valid JSON."""
    if kind not in _FIELDS:
        return
    found = _decoder(kind).decode(data)
    for name, harmless in _FIELDS[kind].items():
        raw = getattr(found, name)
        if raw is msgspec.UNSET:
            continue
        value = msgspec.json.decode(raw)
        if value is None or any(type(value) is type(ok) and value == ok for ok in harmless):
            continue
        if name == "best_of":
            n = msgspec.json.decode(found.n) if found.n is not msgspec.UNSET else None
            if type(value) is int and value == (n or 1):
                continue
        expected = " or ".join(["absent", *(msgspec.json.encode(ok).decode() for ok in harmless)])
        if name == "best_of":
            expected = "absent or equal to n"
        shown = bytes(raw).decode()[:60]
        raise UnsupportedFeature(
            f"{name} is {shown}: not supported, must be {expected}", param=name, value=shown, expected=expected
        )
