"""Answers that stream from a gateway, and what becomes of each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Self

import httpx

from tests.waiting import until

LIFE_S = 240.0


class Answer:
    """One that is as long as asked for, whatever the model would say. Times are time.monotonic()."""

    def __init__(self, http: httpx.AsyncClient, url: str, prompt: str, max_tokens: int) -> None:
        self.num_events = 0
        self.last_at = self.ended_at = 0.0
        self.error = ""
        self.complete = False
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self.task = asyncio.create_task(self._read(http, f"{url}/v1/completions", body))

    async def _read(self, http: httpx.AsyncClient, url: str, body: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(LIFE_S), http.stream("POST", url, json=body) as response:
                assert response.status_code == 200, await response.aread()
                async for line in lines_of(response):
                    if not line:
                        continue
                    self.last_at = time.monotonic()
                    if line == "data: [DONE]":
                        self.complete = True
                    elif "error" in (event := json.loads(line.removeprefix("data: "))):
                        self.error = event["error"]["code"]
                    else:
                        self.num_events += 1
        finally:
            self.ended_at = time.monotonic()


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """Of server-sent events: httpx's own also end at what Unicode has for lines' ends, which a text may hold."""
    rest = b""
    async for received in response.aiter_bytes():
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            yield line.decode()


class Answers(list[Answer]):
    """`async with Answers(url, num=4) as answers:` several at once, each begun when entered."""

    def __init__(self, url: str, *, num: int, max_tokens: int) -> None:
        super().__init__()
        self._url, self._num, self._max_tokens = url, num, max_tokens
        self._http = httpx.AsyncClient(timeout=LIFE_S)

    async def __aenter__(self) -> Self:
        for i in range(self._num):
            self.append(Answer(self._http, self._url, f"Number {i}: tell me a long story.", self._max_tokens))
        await until(lambda: all(a.num_events > 2 or a.task.done() for a in self), 60.0, "every answer's beginning")
        return self

    async def __aexit__(self, *exc: object) -> None:
        for answer in self:
            answer.task.cancel()
        await asyncio.wait([answer.task for answer in self], timeout=10.0)
        await self._http.aclose()

    async def all_ended(self) -> None:
        await asyncio.wait([answer.task for answer in self], timeout=LIFE_S)
        for answer in self:
            answer.task.result()


def broken(answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if not answer.complete]
