"""Logprobs in the two shapes that OpenAI's API has: one for chat, one for completions."""

from collections.abc import Sequence
from typing import Any

from distserve_gateway.output import LogprobEntry
from distserve_gateway.tokenizing import ModelTokenizer

FLOOR = -9999.0  # JSON has no -inf; this is what OpenAI's API sends


class LogprobsJson:
    """`num_top` alternatives are shown for each token."""

    def __init__(self, tokenizer: ModelTokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, FLOOR), "bytes": list(data)}

    def chat(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        content = []
        for entry in entries:
            if entry.logprob is not None:
                top = [self._token(*alternative) for alternative in entry.logprob.top[: self._num_top]]
                content.append(self._token(entry.token_id, entry.logprob.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        tops: list[dict[str, float] | None] = []
        for entry in entries:
            top: dict[str, float] | None = None
            if entry.logprob is not None:
                top = {}
                # The chosen token is always there; of two ids with the same text the likelier counts.
                for token_id, logprob in (*entry.logprob.top[: self._num_top], (entry.token_id, entry.logprob.logprob)):
                    top.setdefault(self._text(token_id), max(logprob, FLOOR))
            tops.append(top)
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [
                None if entry.logprob is None else max(entry.logprob.logprob, FLOOR) for entry in entries
            ],
            "top_logprobs": tops,
            "text_offset": [entry.offset for entry in entries],
        }
