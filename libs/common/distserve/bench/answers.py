"""What became of each request: an exchange taken apart into times, tokens, or what went wrong."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import msgspec

from distserve.bench.client import Exchange
from distserve.bench.sse import read_events
from distserve.bench.traffic import Ask

THROTTLED = "throttled (429)"
Counted = Literal["usage", "events"]


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Times in s since the measurement began; negative ones belong to the warm-up.

    `due_s`: when it was to be sent; `sent_s`: when it was. `kind`: "ok", or what went wrong, by kind. `counted`: usage:
    the server said with each event how many tokens there are; events: an event is taken as a token, and `num_output` is
    what the server said at the end, or, `usage_told` false, the number of events. `times_s`, `counts`: of each event
    with tokens, when it came and how many it brought."""

    index: int
    server: str = ""
    due_s: float
    sent_s: float | None = None
    done_s: float
    kind: str = "ok"
    detail: str = ""
    status: int = 0
    retry_after: str = ""
    num_input_asked: int
    num_output_asked: int
    num_input: int | None = None
    num_output: int = 0
    num_cached: int | None = None
    counted: Counted = "usage"
    usage_told: bool = True
    times_s: list[float] = []
    counts: list[int] = []

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    def ttft_s(self, *, from_sent: bool = False) -> float | None:
        """Until its first token, since it was due (or sent)."""
        since = self.sent_s if from_sent and self.sent_s is not None else self.due_s
        return self.times_s[0] - since if self.times_s else None

    @property
    def e2e_s(self) -> float:
        """Until its last token, since it was due."""
        return (self.times_s[-1] if self.times_s else self.done_s) - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after those of the first event; None of an answer with no such token."""
        if len(self.times_s) < 2 or self.num_output <= self.counts[0]:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (self.num_output - self.counts[0])

    def gaps_s(self) -> list[float]:
        """From token to token; tokens that came together share the pause before them."""
        return [
            (later - sooner) / count
            for (sooner, later), count in zip(pairwise(self.times_s), self.counts[1:], strict=True)
            for _ in range(count)
        ]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None

    @property
    def says(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def says(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.says)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def result(ask: Ask, exchange: Exchange, *, due_s: float, began_s: float, server: str = "") -> Result:
    """`due_s`, `began_s`: on the clock of perf_counter."""
    reading = exchange.reading
    known: dict[str, Any] = {
        "index": ask.index,
        "server": server,
        "due_s": due_s - began_s,
        "sent_s": None if exchange.sent_s is None else exchange.sent_s - began_s,
        "done_s": exchange.done_s - began_s,
        "status": reading.status,
        "num_input_asked": ask.num_input,
        "num_output_asked": ask.num_output,
    }
    if reading.status not in (0, 200):
        return Result(**known, **_refusal(reading.status, reading.content(), reading.headers))
    stream = _Stream(began_s)
    broken = stream.read(exchange)
    if exchange.error is not None:  # what came before may explain more
        kind, detail = exchange.error
        broken = (kind, detail) if broken is None or broken[0] != "error event" else broken
    known |= stream.found()
    if broken is not None:
        known |= {"kind": broken[0], "detail": broken[1][:500]}
    return Result(**known)


def _refusal(status: int, content: bytes, headers: dict[str, str]) -> dict[str, Any]:
    kind = THROTTLED if status == 429 else f"HTTP {status}"
    detail = error_text(content)
    return {"kind": kind, "detail": detail[:500], "retry_after": headers.get("retry-after", "")}


def error_text(content: bytes) -> str:
    """What an error's body says, in the forms of OpenAI, FastAPI and others; else its beginning."""
    try:
        body = msgspec.json.decode(content)
    except ValueError:
        return content[:300].decode(errors="replace")
    return _message(body)


def _message(error: Any) -> str:
    if isinstance(error, dict):
        for name in ("error", "message", "detail"):
            if error.get(name):
                return _message(error[name])
    return str(error)


class _Stream:
    """The events of one answer, as tokens."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._times_s: list[float] = []
        self._counts: list[int] = []
        self._usage: _Usage | None = None
        self._by_usage = False  # events say themselves how many tokens there are
        self._num_tokens = 0  # sum of the counts

    def read(self, exchange: Exchange) -> tuple[str, str] | None:
        """What is wrong with it, as (kind, text)."""
        found = read_events(exchange.reading.body)
        for at_s, data in found.events:
            try:
                chunk = _decode_chunk(data)
            except ValueError as e:
                return "bad event", f"{e}: {data[:200]!r}"
            if chunk.error is not None:
                return "error event", _message(chunk.error)
            self._take(at_s - self._began_s, chunk)
        if not found.done:
            if not found.events and found.rest.lstrip()[:1] == b"{":
                return "no stream", f"the answer is one document, not events: {found.rest[:200]!r}"
            return "no [DONE]", f"the stream ended without it: {found.rest[-200:]!r}"
        if not self._times_s:
            return "no tokens", "the stream held none"
        return None

    def _take(self, at_s: float, chunk: _Chunk) -> None:
        says = any(choice.says for choice in chunk.choices)
        count = int(says)
        if chunk.usage is not None:
            self._usage = chunk.usage
            total = chunk.usage.completion_tokens
            # With the first tokens or not at all: one that comes only with the last event tells of those before, too.
            if total and chunk.choices and (self._by_usage or not self._counts):
                self._by_usage = True
                count = max(0, total - self._num_tokens)
        if count:
            self._num_tokens += count
            self._times_s.append(at_s)
            self._counts.append(count)

    def found(self) -> dict[str, Any]:
        usage, total = self._usage, self._num_tokens
        told = None if usage is None else usage.completion_tokens
        details = None if usage is None else usage.prompt_tokens_details
        return {
            "num_input": None if usage is None else usage.prompt_tokens,
            "num_cached": None if details is None else details.cached_tokens,
            "num_output": total if told is None else told,
            "counted": "usage" if self._by_usage else "events",
            "usage_told": told is not None,
            "times_s": self._times_s,
            "counts": self._counts,
        }
