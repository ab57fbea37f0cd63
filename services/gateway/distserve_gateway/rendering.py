"""Pieces to the JSON that clients read: stream chunks, built by hand from parts encoded once, and whole answers.

A chunk is bytes of one JSON object; the door adds its own frame (`data: …` for SSE, an index for NATS).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import msgspec

from distserve_gateway.answer import Answer
from distserve_gateway.output import LogprobEntry, Piece

encode = msgspec.json.Encoder().encode

_FINISH = {None: b"null", "stop": b'"stop"', "length": b'"length"'}


class Renderer(ABC):
    """One request's. `chunks` for a stream, else `collect` and `whole`; `last_chunks` closes a stream."""

    chunk_object: str
    whole_object: str

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.call = call = answer.call
        self._logprobs = None if call.num_logprobs is None else answer.logprobs_json(call.num_logprobs)
        self._begun: set[int] = set()
        self._texts: list[list[str]] = [[] for _ in range(call.num_outputs)]
        self._entries: list[list[LogprobEntry]] = [[] for _ in range(call.num_outputs)]
        self._ids: list[list[int]] = [[] for _ in range(call.num_outputs)]
        self._finish: list[str | None] = [None] * call.num_outputs
        self._head = self._opening(self.chunk_object)[:-1]
        self._choices = self._head + b',"choices":['
        # OpenAI: with include_usage every chunk has the field, null in all but the last.
        self._usage_null = b',"usage":null' if call.include_usage else b""

    def _opening(self, kind: str) -> bytes:
        call = self.call
        return encode({"id": call.request_id, "object": kind, "created": call.created, "model": call.model})

    def usage(self) -> dict[str, Any]:
        prompt, completion = self.call.num_prompt_tokens, self.answer.num_output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.answer.num_cached_tokens},
        }

    def _usage_part(self) -> bytes:
        return b',"usage":' + encode(self.usage()) if self.call.continuous_usage else self._usage_null

    def chunks(self, pieces: Iterable[Piece]) -> list[bytes]:
        """The chunks of these pieces; an output's first piece may bring an opening one."""
        out = []
        usage = self._usage_part()
        for piece in pieces:
            if piece.index not in self._begun:
                self._begun.add(piece.index)
                out += [b"%b%b]%b}" % (self._choices, c, usage) for c in self.begin(piece.index)]
            out.append(self.chunk(piece, usage))
        return out

    def chunk(self, piece: Piece, usage: bytes) -> bytes:
        choice = self.choice(piece)
        if self.call.token_ids:
            choice = self._with_ids(choice, piece)
        return b"%b%b]%b}" % (self._choices, choice, usage)

    def _with_ids(self, choice: bytes, piece: Piece) -> bytes:
        return choice[:-1] + b',"token_ids":' + encode(piece.token_ids) + b"}"

    def last_chunks(self) -> list[bytes]:
        """After the last piece: usage and timings, if they were asked for."""
        if not (self.call.include_usage or self.call.timings):
            return []
        tail: dict[str, Any] = {"choices": [], "usage": self.usage()}
        if self.call.timings:
            tail["timings"] = self.answer.timings()
        return [self._head + b"," + encode(tail)[1:]]

    def collect(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._texts[piece.index].append(piece.text)
            self._entries[piece.index] += piece.logprobs
            self._ids[piece.index] += piece.token_ids
            self._finish[piece.index] = piece.finish_reason or self._finish[piece.index]

    def whole(self) -> bytes:
        """The answer to a request without stream, from what was collected."""
        choices = [self.whole_choice(i, "".join(texts)) for i, texts in enumerate(self._texts)]
        if self.call.token_ids:
            for i, choice in enumerate(choices):
                choice["prompt_token_ids"] = self.answer.prompt_token_ids(i)
                choice["token_ids"] = self._ids[i]
        body = self.body(choices)
        body["usage"] = self.usage()
        if self.call.timings:
            body["timings"] = self.answer.timings()
        return self._opening(self.whole_object)[:-1] + b"," + encode(body)[1:]

    def body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"choices": choices}

    def begin(self, index: int) -> list[bytes]:
        """Choices of chunks that come before an output's first piece."""
        return []

    @abstractmethod
    def choice(self, piece: Piece) -> bytes: ...

    @abstractmethod
    def whole_choice(self, index: int, text: str) -> dict[str, Any]: ...


class ChatRenderer(Renderer):
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def begin(self, index: int) -> list[bytes]:
        return [b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index]

    def choice(self, piece: Piece) -> bytes:
        return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (
            piece.index,
            b'{"content":' + encode(piece.text) + b"}" if piece.text or not piece.finish_reason else b"{}",
            b"null" if self._logprobs is None else encode(self._logprobs.chat(piece.logprobs)),
            _FINISH[piece.finish_reason],
        )

    def whole_choice(self, index: int, text: str) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if self._logprobs is None else self._logprobs.chat(self._entries[index]),
            "finish_reason": self._finish[index],
        }


class CompletionRenderer(Renderer):
    chunk_object = whole_object = "text_completion"

    def begin(self, index: int) -> list[bytes]:
        if not self.call.echo:
            return []
        entries = self.answer.prompt_logprobs(index) if self._logprobs else []
        return [self.choice(Piece(index, self.answer.prompt_text(index), None, entries))]

    def choice(self, piece: Piece) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            piece.index,
            encode(piece.text),
            b"null" if self._logprobs is None else encode(self._logprobs.completion(piece.logprobs)),
            _FINISH[piece.finish_reason],
        )

    def whole_choice(self, index: int, text: str) -> dict[str, Any]:
        entries = self._entries[index]
        if self.call.echo:
            text = self.answer.prompt_text(index) + text
            if self._logprobs:
                entries = self.answer.prompt_logprobs(index) + entries
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs.completion(entries),
            "finish_reason": self._finish[index],
        }


class GenerateRenderer(Renderer):
    """/generate: one output, its text at the top."""

    chunk_object = "text_generation.chunk"
    whole_object = "text_generation"

    def chunk(self, piece: Piece, usage: bytes) -> bytes:
        choice = self.choice(piece)
        if self.call.token_ids:
            choice = self._with_ids(choice, piece)
        return self._head + b"," + choice[1:-1] + usage + b"}"

    def choice(self, piece: Piece) -> bytes:
        return b'{"text":%b,"finish_reason":%b}' % (encode(piece.text), _FINISH[piece.finish_reason])

    def last_chunks(self) -> list[bytes]:
        return [chunk.replace(b'"choices":[],', b"", 1) for chunk in super().last_chunks()]

    def body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return choices[0]

    def whole_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"text": text, "finish_reason": self._finish[index]}


RENDERERS: dict[str, type[Renderer]] = {
    "chat": ChatRenderer,
    "completion": CompletionRenderer,
    "generate": GenerateRenderer,
}
