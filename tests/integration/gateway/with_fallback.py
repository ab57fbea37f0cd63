"""A gateway whose fallback is a real server on a real socket: another DistServe gateway, or one that misbehaves."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from distserve.config import BreakerConfig
from distserve.messages import SubmitRequest
from distserve_gateway import server
from tests.unit.gateway import vocabularies
from tests.unit.gateway.scripted import TOKENIZER, Cluster, Script, serving

ROUTES = ("/v1/chat/completions", "/v1/completions", "/generate")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/generate": {"prompt": "hello"},
}


def goes_on(text: str) -> Script:
    """This text, from where the prompt's last tokens have brought it, and eos."""
    ids = [*TOKENIZER.encode(text, add_special_tokens=False), vocabularies.EOS_ID]

    def script(request: SubmitRequest) -> list[int]:
        prompt = request.token_ids
        num_there = max(k for k in range(len(ids)) if k == 0 or prompt[-k:] == ids[:k])
        return ids[num_there:]

    return script


@asynccontextmanager
async def over_http(script: Script, **options: Any) -> AsyncIterator[tuple[Cluster, str]]:
    """(cluster, its gateway's URL): workers `p0` and `d0` on a bus of their own."""
    async with serving(script, **options) as cluster:
        listener = server.bind("127.0.0.1", 0)
        async with server.serving(cluster.app, listener):
            yield cluster, f"http://127.0.0.1:{listener.getsockname()[1]}"


def falling_back(url: str, **settings: Any) -> BreakerConfig:
    """Opens after one late second, and is tried again only after long. A busy machine may be slow to connect."""
    patient = {"for_s": 1, "open_s": 600.0, "ttft_p99_ms": 60_000, "connect_timeout_s": 30.0}
    return BreakerConfig(**({"fallback_url": url} | patient | settings))


def open_breaker(cluster: Cluster) -> None:
    breaker = cluster.gateway.trials.breaker
    for _ in range(breaker.policy.for_s):
        breaker.second(1e6)
    assert breaker.state == "open"


@asynccontextmanager
async def fallen_back(script: Script, fallback_url: str, **options: Any) -> AsyncIterator[tuple[Cluster, str]]:
    """A gateway whose breaker is open, and its URL."""
    async with over_http(script, breaker=falling_back(fallback_url), **options) as (cluster, url):
        open_breaker(cluster)
        yield cluster, url


@dataclass
class Asked:
    """A request as the server got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


Behaviour = Callable[[asyncio.StreamWriter], Awaitable[None]]


class OwnServer:
    """Speaks as much HTTP as is needed, and answers every request as it is told; `left` once a client has gone."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.asked: list[Asked] = []
        self.left = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        finally:
            listening.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            method, path, _ = first.split()
            self.asked.append(Asked(method, path, headers, json.loads(body or b"null")))
            answering = asyncio.ensure_future(self.behaviour(writer))
            gone = asyncio.create_task(reader.read())
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.left.set()
            answering.cancel()
            gone.cancel()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.left.set()
        finally:
            writer.close()


def head(status: int = 200, content_type: str = "text/event-stream", *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status} x", f"content-type: {content_type}", "connection: close", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def event(text: str | None = None, finish_reason: str | None = None, **fields: Any) -> bytes:
    """Of a stream of completions."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish_reason}]
    return b"data: " + json.dumps({"id": "theirs", "model": "theirs", "choices": choices} | fields).encode() + b"\n\n"


def says_bytes(*parts: bytes, then_hangs: bool = False) -> Behaviour:
    async def behaviour(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if then_hangs:
            await asyncio.Event().wait()

    return behaviour


# ------------------------------------------------------------ clients


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


def events_of(text: str) -> list[Any]:
    """The data of a stream's events; `[DONE]` as it is."""
    parts = [part.removeprefix("data: ") for part in text.strip().split("\n\n")]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


def text_of(answer: Any) -> str:
    """What an event, or a whole answer, says: of its first choice."""
    choices = answer.get("choices", [answer])
    return "".join(
        choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        for choice in choices[:1]
    )


def streamed_text(text: str) -> str:
    """Of a stream that is complete."""
    *events, done = events_of(text)
    assert done == "[DONE]"
    assert not [event for event in events if "error" in event]
    return "".join(map(text_of, events))
