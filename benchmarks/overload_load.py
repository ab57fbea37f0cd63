"""An open loop of requests: they come by a Poisson process, whatever becomes of those before."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from benchmarks.load import Case, ask, draw_prompts, request
from benchmarks.load_sse import BadAnswer, Piece, head, tokens
from distserve.bench.arrivals import poisson


@dataclass(frozen=True, slots=True)
class Plan:
    """`rate_hz` requests a second for `window_s`; answers are waited for `drain_s` more. `slo_s`: what is promised, or,
    where nothing is, what they are judged by."""

    rate_hz: float
    slo_s: float
    prompt: int
    output: int
    window_s: float = 30.0
    drain_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Answer:
    """`status`: of HTTP; 0: there was none when the run ended. `ttft_s`: inf without a token. `done_s`: until the
    connection was closed."""

    status: int
    ttft_s: float
    done_s: float
    retry_after: str
    broken: str = ""  # an accepted one that did not end as it should: how


def run(port: int, plan: Plan, headers: Mapping[str, str], rng: random.Random, vocab_size: int) -> list[Answer]:
    """Raises TimeoutError, OSError."""
    times = list(takewhile(lambda at: at < plan.window_s, poisson(rng, plan.rate_hz)))
    prompts = draw_prompts(rng, Case(1, plan.prompt, plan.output, len(times)), vocab_size)
    return asyncio.run(_run(port, plan, times, [request(p, plan.output, headers) for p in prompts]))


async def _run(port: int, plan: Plan, times: Sequence[float], bodies: Sequence[bytes]) -> list[Answer]:
    began = time.perf_counter()
    ends = began + plan.window_s + plan.drain_s
    tasks = []
    for at, body in zip(times, bodies, strict=True):
        await asyncio.sleep(began + at - time.perf_counter())
        tasks.append(asyncio.create_task(_ask(port, body, ends)))
    return [answer(*found) for found in await asyncio.gather(*tasks)]


async def _ask(port: int, body: bytes, until_s: float) -> tuple[list[Piece] | None, float]:
    sent = time.perf_counter()
    try:
        async with asyncio.timeout(max(0.0, until_s - sent)) as limit:
            return await ask(port, body), time.perf_counter() - sent
    except TimeoutError:
        if not limit.expired():
            raise
        return None, time.perf_counter() - sent


def answer(pieces: Sequence[Piece] | None, done_s: float) -> Answer:
    if pieces is None:
        return Answer(0, math.inf, done_s, "")
    status, headers = head(pieces)
    retry_after = headers.get("retry-after", "")
    if status != 200:
        return Answer(status, math.inf, done_s, retry_after)
    try:
        found = tokens(pieces)
    except BadAnswer as e:
        return Answer(status, math.inf, done_s, retry_after, str(e))
    return Answer(status, found.times_s[0] if found.times_s else math.inf, done_s, retry_after)
