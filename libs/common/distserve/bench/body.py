"""The request of each ask, as bytes: endpoint, model, fields, headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from distserve.bench.client import Address
from distserve.bench.prompts import Words
from distserve.bench.traffic import Ask
from distserve.bench.wire import request

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Form:
    """What all requests to one server have in common. `extra`: fields of the user's, which win over ours. `promise`:
    fields of what is measured, not of what is asked before. `dropped`: fields of ours that the server refuses."""

    address: Address
    endpoint: Endpoint
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    promise: Mapping[str, Any] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()

    def without(self, *names: str) -> Form:
        return replace(self, dropped=self.dropped | set(names))

    def prompt(self, text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]} if self.endpoint == "chat" else {"prompt": text}

    def body(self, text: str, num_output: int, *, stream: bool = True) -> dict[str, Any]:
        limit = "max_completion_tokens" if "max_tokens" in self.dropped else "max_tokens"
        fields: dict[str, Any] = {"model": self.model, **self.prompt(text), limit: num_output}
        optional: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        if stream:
            fields["stream"] = True
            options = {"include_usage": True, "continuous_usage_stats": True}
            optional["stream_options"] = {n: v for n, v in options.items() if n not in self.dropped}
        fields |= {name: value for name, value in optional.items() if name not in self.dropped}
        return fields | dict(self.extra)

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        headers = self._headers({"Host": self.address.header, "Content-Type": "application/json"})
        return request("POST", self.address.prefix + path, headers, msgspec.json.encode(body))

    def get(self, path: str) -> bytes:
        return request("GET", self.address.prefix + path, self._headers({"Host": self.address.header}))

    def _headers(self, ours: Mapping[str, str]) -> dict[str, str]:
        """The user's win, in any case of letters."""
        given = {name.lower() for name in self.headers}
        return {name: value for name, value in ours.items() if name.lower() not in given} | dict(self.headers)

    def ask(self, words: Words, ask: Ask) -> bytes:
        return self.post(PATHS[self.endpoint], self.body(words.text(ask), ask.num_output) | dict(self.promise))
