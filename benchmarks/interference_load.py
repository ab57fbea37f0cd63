"""Steady answers in a closed loop, and long prompts that come among them whether or not the last one is done."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.load import Case, ask, draw_prompts, request
from benchmarks.load_sse import Piece, tokens
from benchmarks.load_stats import percentile


@dataclass(frozen=True, slots=True)
class Plan:
    """`streams` answers of `output` tokens after `prompt` run at any time; every `every_s` (None: never) a prompt of
    `long_prompt` comes, 1 to 8 tokens out. What is measured is a window of `window_s` after `warm_s`; long prompts that
    came in it are waited for `drain_s` more."""

    every_s: float | None
    window_s: float = 40.0
    warm_s: float = 8.0
    drain_s: float = 30.0
    streams: int = 8
    prompt: int = 32
    output: int = 256
    long_prompt: int = 2048

    @property
    def num_long(self) -> int:
        """From the beginning to the end of the window."""
        return 0 if self.every_s is None else int((self.warm_s + self.window_s) / self.every_s)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Of one window. `gaps_s`: each pause between two events of a steady answer that ended in it. `long_ttfts_s`: of
    the long prompts that came in it; of the `num_unanswered` ones how long they had waited. `queue`: long prompts
    without a first token as the window began and as it ended."""

    gaps_s: list[float]
    tokens_per_s: float
    long_ttfts_s: list[float]
    num_unanswered: int
    queue: tuple[int, int]

    @property
    def itl_p99(self) -> float:
        return percentile(self.gaps_s, 99)

    @property
    def grows(self) -> bool:
        """More long prompts wait at the end than one that has just come: this rate is not sustained."""
        return self.num_unanswered > 0 or self.queue[1] - self.queue[0] > 1


@dataclass(frozen=True, slots=True)
class Asked:
    """`sent_s` on the clock of perf_counter; `pieces`: None if it was given up at `left_s`."""

    sent_s: float
    pieces: list[Piece] | None
    left_s: float


def run(port: int, plan: Plan, rng: random.Random, vocab_size: int) -> Mixed:
    """Raises BadAnswer, TimeoutError, OSError."""
    most = 1000 * plan.streams  # more than can be answered meanwhile
    short = draw_prompts(rng, Case(plan.streams, plan.prompt, plan.output, most), vocab_size)
    long = draw_prompts(rng, Case(1, plan.long_prompt, 1, plan.num_long), vocab_size)
    return asyncio.run(_run(port, plan, short, long))


async def _run(port: int, plan: Plan, short: Sequence[list[int]], long: Sequence[list[int]]) -> Mixed:
    began = time.perf_counter()
    opens, closes = began + plan.warm_s, began + plan.warm_s + plan.window_s
    prompts = iter(short)
    steady: list[Asked] = []

    async def stream(number: int) -> None:
        output = plan.output * (number + 1) // plan.streams  # the first ones differ, so that not all end at once
        while time.perf_counter() < closes:
            sent = time.perf_counter()
            pieces = await ask(port, request(next(prompts), output))
            steady.append(Asked(sent, pieces, time.perf_counter()))
            output = plan.output

    async def come() -> list[Asked]:
        tasks = []
        for number, prompt in enumerate(long):
            data = request(prompt, 1 + number % 8)
            await asyncio.sleep(began + number * (plan.every_s or 0.0) - time.perf_counter())
            tasks.append(asyncio.create_task(_long(port, data, closes + plan.drain_s)))
        return await asyncio.gather(*tasks)

    async with asyncio.TaskGroup() as group:
        coming = group.create_task(come())
        for number in range(plan.streams):
            group.create_task(stream(number))
    return taken(steady, coming.result(), opens, closes)


async def _long(port: int, data: bytes, until_s: float) -> Asked:
    sent = time.perf_counter()
    try:
        async with asyncio.timeout(max(0.0, until_s - sent)) as limit:
            return Asked(sent, await ask(port, data), time.perf_counter())
    except TimeoutError:
        if not limit.expired():
            raise
        return Asked(sent, None, time.perf_counter())


def taken(steady: Sequence[Asked], long: Sequence[Asked], opens: float, closes: float) -> Mixed:
    """What counts of a run, whose window is [opens, closes). Raises BadAnswer."""
    gaps, num_tokens = [], 0
    for asked in steady:
        assert asked.pieces is not None
        found = tokens(asked.pieces)
        times = [asked.sent_s + t for t in found.times_s]
        num_tokens += sum(n for t, n in zip(times, found.counts, strict=True) if opens <= t < closes)
        gaps += [b - a for a, b in pairwise(times) if opens <= b < closes]
    firsts = [(a.sent_s, a.left_s if a.pieces is None else a.sent_s + tokens(a.pieces).times_s[0]) for a in long]
    return Mixed(
        gaps_s=gaps,
        tokens_per_s=num_tokens / (closes - opens),
        long_ttfts_s=[first - sent for sent, first in firsts if opens <= sent < closes],
        num_unanswered=sum(a.pieces is None for a in long),
        queue=(waiting(firsts, opens), waiting(firsts, closes)),
    )


def waiting(firsts: Sequence[tuple[float, float]], at_s: float) -> int:
    """Sent before, first token after."""
    return sum(sent < at_s < first for sent, first in firsts)
