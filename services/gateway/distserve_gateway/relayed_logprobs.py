"""Logprobs of the fallback server: shown as it wrote them, cut only where its chunks are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distserve_gateway.logprobs_json import LogprobsJson
from distserve_gateway.output import LogprobEntry

_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")  # of completions, one item a token


@dataclass(slots=True)
class RelayedEntry(LogprobEntry):
    """`shown`: a token's part of the JSON; of chat its object, of completions its item of each of _LISTS."""

    shown: Any = None


def relayed_entries(logprobs: dict[str, Any] | None) -> list[LogprobEntry]:
    """The tokens of a choice's `logprobs`, of either shape."""
    if logprobs is None:
        return []
    shown: Sequence[Any] = logprobs.get("content") or ()
    if "tokens" in logprobs:
        lists = [logprobs.get(name) or [] for name in _LISTS]
        shown = [[items[i] if i < len(items) else None for items in lists] for i in range(len(lists[0]))]
    return [RelayedEntry(0, None, 0, item) for item in shown]


class RelayedLogprobs(LogprobsJson):
    """In place of the one that knows this gateway's tokens."""

    def __init__(self) -> None: ...

    def chat(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        return {"content": [entry.shown for entry in entries if isinstance(entry, RelayedEntry)], "refusal": None}

    def completion(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        rows = [entry.shown for entry in entries if isinstance(entry, RelayedEntry)]
        return {name: [row[i] for row in rows] for i, name in enumerate(_LISTS)}
