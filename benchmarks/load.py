"""A load of streamed completions over the OpenAI API, light enough to share two cores with the server.

A closed loop: so many streams, each sends its next prompt when its answer has ended. Prompts are distinct random token
ids, so that no prefix cache helps; the answers greedy, of a fixed length. The client stamps bytes as they come and
takes them apart afterwards (load_sse.py).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.load_sse import BadAnswer, Piece, Tokens, tokens
from benchmarks.load_stats import percentile
from distserve.bench import wire

ANSWER_S = 300.0  # the longest that one answer may take
MODEL = "bench"  # the name under which servers serve


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked: `streams` at once, `requests` in all, prompts of `prompt` tokens, `output` tokens each."""

    streams: int
    prompt: int
    output: int
    requests: int

    def __str__(self) -> str:
        return f"{self.prompt}/{self.output} x {self.streams}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run of a case. Seconds; one value a request, in `gaps_s` one for each pause between two events."""

    tokens_per_s: float
    ttfts_s: list[float]
    tpots_s: list[float]
    gaps_s: list[float]

    @property
    def ttft_p50(self) -> float:
        return percentile(self.ttfts_s, 50)

    @property
    def ttft_p99(self) -> float:
        return percentile(self.ttfts_s, 99)

    @property
    def tpot_p50(self) -> float:
        return percentile(self.tpots_s, 50)

    @property
    def tpot_p99(self) -> float:
        return percentile(self.tpots_s, 99)

    @property
    def itl_p99(self) -> float:
        return percentile(self.gaps_s, 99)


def draw_prompts(rng: random.Random, case: Case, vocab_size: int) -> list[list[int]]:
    """Ids from the middle of the vocabulary: special tokens are at its ends."""
    low, high = min(100, vocab_size // 8), vocab_size - min(100, vocab_size // 8)
    return [[rng.randrange(low, high) for _ in range(case.prompt)] for _ in range(case.requests)]


def measure(port: int, case: Case, prompts: Sequence[list[int]]) -> Figures:
    """Raises BadAnswer for a request that did not end as it should, TimeoutError, OSError."""
    wall_s, answers = asyncio.run(_closed_loop(port, case, prompts))
    return figures(wall_s, [tokens(answer) for answer in answers], case.output)


def figures(wall_s: float, answers: Sequence[Tokens], output: int) -> Figures:
    """`wall_s`: from the first request to the end of the last answer. Raises BadAnswer for one of another length."""
    for answer in answers:
        if answer.num_tokens != output:
            raise BadAnswer(f"{answer.num_tokens} tokens came instead of {output}")
    return Figures(
        tokens_per_s=sum(a.num_tokens for a in answers) / wall_s,
        ttfts_s=[a.times_s[0] for a in answers],
        tpots_s=[_tpot_s(a) for a in answers if a.num_tokens > a.counts[0]],
        gaps_s=[later - sooner for a in answers for sooner, later in zip(a.times_s, a.times_s[1:], strict=False)],
    )


def _tpot_s(answer: Tokens) -> float:
    """Mean time of a token after those of the first event."""
    return (answer.times_s[-1] - answer.times_s[0]) / (answer.num_tokens - answer.counts[0])


async def _closed_loop(port: int, case: Case, prompts: Sequence[list[int]]) -> tuple[float, list[list[Piece]]]:
    bodies = iter([request(prompt, case.output) for prompt in prompts])
    answers: list[list[Piece]] = []

    async def stream() -> None:
        for body in bodies:
            answers.append(await ask(port, body))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(case.streams):
            group.create_task(stream())
    return time.perf_counter() - began, answers


def request(prompt: Sequence[int], output: int, headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of one request: a streamed greedy completion of exactly `output` tokens. `headers`: more of them."""
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    ).encode()
    own = {"Host": "127.0.0.1", "Content-Type": "application/json", "Connection": "close"}
    return wire.request("POST", "/v1/completions", {**own, **(headers or {})}, body)


async def ask(port: int, data: bytes, answer_s: float = ANSWER_S) -> list[Piece]:
    """Send one request to this machine's `port`; what came until the server closed. Raises TimeoutError, OSError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(answer_s):
        transport, client = await loop.create_connection(lambda: _Client(data), "127.0.0.1", port)
        try:
            await client.closed
        finally:
            transport.abort()
    return client.pieces


class _Client(asyncio.Protocol):
    """Sends one request as soon as it is connected and stamps what comes. The clock starts before the first byte."""

    def __init__(self, data: bytes) -> None:
        self.pieces: list[Piece] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._data = data
        self._began = time.perf_counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._began = time.perf_counter()
        transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter() - self._began, data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            if exc is None:
                self.closed.set_result(None)
            else:
                self.closed.set_exception(exc)
