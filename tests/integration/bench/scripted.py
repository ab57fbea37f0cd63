"""A real HTTP server on a local socket that speaks OpenAI's API as a test scripts it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from distserve.bench.document import Document
from distserve.bench.options import Raw, check
from distserve.bench.run import run


@dataclass(slots=True)
class Asked:
    """One request as it came. `at_s`: perf_counter."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at_s: float
    names: list[str]  # of the headers, as they were written, each as often as it came

    @property
    def text(self) -> str:
        messages = self.body.get("messages")
        return str(messages[0]["content"] if messages else self.body.get("prompt", ""))

    @property
    def num_output(self) -> int:
        return int(self.body.get("max_tokens") or self.body.get("max_completion_tokens") or 0)


class Reply:
    """Writes one answer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def document(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} Any", f"Content-Length: {len(data)}", "Server: scripted"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await self._writer.drain()

    async def begin(self) -> None:
        self._writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self._writer.drain()

    async def event(self, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        event = b"data: " + data + b"\n\n"
        self._writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await self._writer.drain()

    async def done(self, *, said: bool = True) -> None:
        if said:
            await self.event(b"[DONE]")
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    def cut(self) -> None:
        self._writer.transport.abort()


Script = Callable[[Asked, Reply], Awaitable[None]]


def tokens_of(asked: Asked, overhead: int) -> int:
    """Words are tokens here; a template takes the rest."""
    return len(asked.text.split()) + overhead


def chunk(asked: Asked, text: str, num: int | None, num_prompt: int) -> dict[str, Any]:
    choice = {"delta": {"content": text}} if "messages" in asked.body else {"text": text}
    usage = {} if num is None else {"usage": {"prompt_tokens": num_prompt, "completion_tokens": num}}
    return {"choices": [{"index": 0, **choice}], **usage}


def streaming(
    *, ttft_s: float = 0.0, gap_s: float = 0.0, per_event: int = 1, usage: str = "each", overhead: int = 0
) -> Script:
    """A server that keeps to everything it is asked. `usage`: each (event), end or never."""

    async def script(asked: Asked, reply: Reply) -> None:
        num, num_prompt = asked.num_output, tokens_of(asked, overhead)
        if not asked.body.get("stream"):
            await reply.document({"usage": {"prompt_tokens": num_prompt, "completion_tokens": num}})
            return
        await asyncio.sleep(ttft_s)
        await reply.begin()
        sent = 0
        while sent < num:
            if sent:
                await asyncio.sleep(gap_s)
            sent = min(num, sent + per_event)
            await reply.event(chunk(asked, "x" * per_event, sent if usage == "each" else None, num_prompt))
        if usage != "never":
            await reply.event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": sent}})
        await reply.done()

    return script


@dataclass(slots=True)
class Scripted:
    """`script` answers what asks for tokens; `tokenize`: tokens that /tokenize counts besides the words, None: it has
    none. `model`: the one that it lists, "": it has no list. `refuses`: paths that it answers with this status."""

    script: Script
    tokenize: int | None = 0
    model: str = "scripted"
    per_connection: int = 1_000_000  # requests that one answers; it is closed when the next has come
    refuses: dict[str, int] = field(default_factory=dict)
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0

    @property
    def answers(self) -> list[Asked]:
        """Of those with a prompt that streamed, without the first, which is the probe."""
        return [a for a in self.asked if a.body.get("stream")][1:]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        reply = Reply(writer)
        try:
            for _ in range(self.per_connection):
                asked = await _read(reader)
                self.asked.append(asked)
                await self._answer(asked, reply)
            await _read(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, asked: Asked, reply: Reply) -> None:
        if asked.path in self.refuses:
            await reply.document({"error": {"message": "who are you"}}, self.refuses[asked.path])
        elif asked.path == "/v1/models" and self.model:
            await reply.document({"data": [{"id": self.model, "max_model_len": 4096}]})
        elif asked.path == "/version":
            await reply.document({"version": "1.2.3"})
        elif asked.path == "/tokenize" and self.tokenize is not None:
            await reply.document({"count": tokens_of(asked, self.tokenize)})
        elif asked.path in ("/v1/completions", "/v1/chat/completions"):
            await self.script(asked, reply)
        else:
            await reply.document({"detail": "Not Found"}, 404)


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    at_s = time.perf_counter()
    method, path, _ = head[0].split(" ")
    pairs = [(name, value.strip()) for name, _, value in (line.partition(":") for line in head[1:]) if name]
    headers = {name.lower(): value for name, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, json.loads(body) if body else {}, at_s, [name for name, _ in pairs])


@asynccontextmanager
async def serving(scripted: Scripted) -> Any:
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        server.close()


async def measured(server: Scripted, **given: Any) -> Document:
    """A small measurement of it. `given`: options, by their names in Raw."""
    defaults: dict[str, Any] = {"floor": False, "input": "20", "output": "4", "warmup": "0", "deadline": "5s"}
    async with asyncio.timeout(60):
        return await run(check(Raw(**{"url": server.url} | defaults | given)), lambda line: None)
