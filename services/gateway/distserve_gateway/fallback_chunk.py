"""A chunk of the fallback's streams, as far as it is read here."""

from typing import Any

import msgspec

from distserve.messages import FinishReason


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    """Of chat (`delta`) or completions (`text`). `logprobs` as they came."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def content(self) -> str:
        return self.text or (self.delta.content if self.delta is not None else None) or ""

    @property
    def end(self) -> FinishReason | None:
        """Why it ends, in our words: what is neither is a stop."""
        return None if self.finish_reason is None else "length" if self.finish_reason == "length" else "stop"


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details is not None else 0


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decoder = msgspec.json.Decoder(Chunk)
