"""Made-up requests to a store of blocks, from seeds: what store_eviction.py plays."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

NUM_PROMPTS = 400  # system prompts and documents that requests share
ZIPF = 1.1  # exponent of their popularity


@dataclass(slots=True)
class Trace:
    """`chains[i]`: the blocks of request i, the prompt's first one first. Blocks are numbers, the same number the same
    content; `depth` of each. `talks[i]`: its conversation's number, -1 for none."""

    chains: list[NDArray[np.int64]] = field(default_factory=list)
    talks: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def grow(self, chain: NDArray[np.int64], n: int) -> NDArray[np.int64]:
        """The chain and n blocks that no request had before."""
        first = len(self.depths)
        self.depths += range(len(chain), len(chain) + n)
        return np.concatenate((chain, np.arange(first, first + n)))

    def ask(self, chain: NDArray[np.int64], talk: int = -1) -> None:
        self.chains.append(chain)
        self.talks.append(talk)

    @property
    def num_accesses(self) -> int:
        return sum(map(len, self.chains))


NOTHING = np.zeros(0, np.int64)


class _Prompts:
    """Shared beginnings, drawn by Zipf's law; lengths 8 to 64 blocks."""

    def __init__(self, trace: Trace, rng: np.random.Generator) -> None:
        self._rng = rng
        self._chains = [trace.grow(NOTHING, int(rng.integers(8, 65))) for _ in range(NUM_PROMPTS)]
        weights = 1.0 / np.arange(1, NUM_PROMPTS + 1) ** ZIPF
        self._weights = weights / weights.sum()

    def draw(self) -> NDArray[np.int64]:
        return self._chains[self._rng.choice(NUM_PROMPTS, p=self._weights)]


def shared_prompts(num_requests: int, seed: int) -> Trace:
    """One shared prompt and 1 to 12 blocks of one's own, never asked for again."""
    rng, trace = np.random.default_rng(seed), Trace()
    prompts = _Prompts(trace, rng)
    for _ in range(num_requests):
        trace.ask(trace.grow(prompts.draw(), int(rng.integers(1, 13))))
    return trace


def conversations(num_requests: int, seed: int) -> Trace:
    """Turns of conversations: a shared prompt, then 4 to 30 blocks more each turn, on average 6 turns. The next turn
    comes after 20 to 2,000 other requests or so (log-normal, median 150)."""
    rng, trace = np.random.default_rng(seed), Trace()
    _play(trace, rng, num_requests, iter(lambda: None, 0))
    return trace


def with_scans(num_requests: int, seed: int) -> Trace:
    """Conversations, and long documents asked for once: a tenth of the requests, 100 to 400 blocks each, in bursts."""
    rng, trace = np.random.default_rng(seed), Trace()
    _play(trace, rng, num_requests, _bursts(trace, rng))
    return trace


TRACES: dict[str, Callable[[int, int], Trace]] = {
    "shared prompts (Zipf)": shared_prompts,
    "conversations": conversations,
    "conversations and scans": with_scans,
}


def _bursts(trace: Trace, rng: np.random.Generator) -> Iterator[NDArray[np.int64] | None]:
    """A scan's chain, or None for no scan, at each request."""
    left = 0
    while True:
        if not left and rng.random() < 1 / 450:
            left = 50
        if left:
            left -= 1
            yield trace.grow(NOTHING, int(rng.integers(100, 401)))
        else:
            yield None


def _play(
    trace: Trace, rng: np.random.Generator, num_requests: int, others: Iterator[NDArray[np.int64] | None]
) -> None:
    prompts = _Prompts(trace, rng)
    due: list[tuple[float, int, NDArray[np.int64]]] = []  # when, whose, what there is of it
    num_talks = 0
    for now in range(num_requests):
        if (other := next(others)) is not None:
            trace.ask(other)
            continue
        if due and due[0][0] <= now:
            _, talk, chain = heapq.heappop(due)
        else:
            talk, chain, num_talks = num_talks, prompts.draw(), num_talks + 1
        chain = trace.grow(chain, int(rng.integers(4, 31)))
        trace.ask(chain, talk)
        if rng.random() > 1 / 6:
            heapq.heappush(due, (now + rng.lognormal(np.log(150), 1.0), talk, chain))
