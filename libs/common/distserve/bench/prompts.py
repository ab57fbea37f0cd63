"""Prompts of an exact number of tokens: common words that the tokenizer takes for one token each, counted out.

In tokenizers that split text at spaces first, as nearly all do, a word's tokens do not depend on its neighbours. So the
words that are one token are found once, and every prompt is then as long as it is to be without being tokenised.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from distserve.bench.trace import BLOCK_TOKENS
from distserve.bench.traffic import Ask
from distserve.bench.words import CANDIDATES

ANCHOR = "Go"  # first in every prompt: a text's first word has no space before it and may be split otherwise
MIN_WORDS = 8
_GROUP = 32  # words looked at together


Count = Callable[[str], Awaitable[int | None]]  # tokens of the whole prompt that this text becomes; None: can't tell


@dataclass(frozen=True, slots=True)
class Words:
    """`words`: of `per_word` tokens each. `overhead`: tokens of a prompt besides, of the anchor, a template, special
    ones. `source`: how that is known, for people; `is_exact`: every word is a token."""

    words: tuple[str, ...]
    overhead: int
    source: str
    is_exact: bool = True
    per_word: float = 1.0

    def text(self, ask: Ask) -> str:
        """The prompt of `ask`; one word at least."""
        num = max(1, round((ask.num_input - self.overhead) / self.per_word))
        return " ".join([ANCHOR, *self._words(ask, num)])

    def _words(self, ask: Ask, num: int) -> Sequence[str]:
        found: list[str] = []
        for block in ask.blocks:
            if len(found) >= num:
                break
            found += random.Random(block).choices(self.words, k=round(BLOCK_TOKENS / self.per_word))
        if len(found) < num:
            found += random.Random(ask.name).choices(self.words, k=num - len(found))
        return found[:num]


UNCHECKED = Words(CANDIDATES, 1, "not checked: every word is taken for a token", is_exact=False)


async def learn(count: Count, source: str, most_asks: int, candidates: Sequence[str] = CANDIDATES) -> Words:
    """Which of the words are a token each, and what is there besides, by asking `count` at most `most_asks` times.
    UNCHECKED if it can't tell; where hardly a word is a token, how many are on average."""
    asks = _Asks(count, most_asks)
    alone = await asks.of([])
    if alone is None:
        return UNCHECKED
    found: list[str] = []
    groups = [list(candidates[i : i + _GROUP]) for i in range(0, len(candidates), _GROUP)]
    while groups:
        group = groups.pop(0)
        tokens = await asks.of(group)
        if tokens is None:
            break
        if tokens - alone == len(group):
            found += group
        elif len(group) > 1:
            half = len(group) // 2
            groups += [group[:half], group[half:]]
    if len(found) < MIN_WORDS or not await _adds_up(asks, found, alone):
        return await _about(asks, alone, source, candidates)
    return Words(tuple(sorted(found)), alone, source)


async def _about(asks: _Asks, alone: int, source: str, candidates: Sequence[str]) -> Words:
    """Where words are of no common length: as many as give that many tokens on average."""
    asks.most += 1
    tokens = await asks.of(candidates)
    if tokens is None or tokens <= alone:
        return UNCHECKED
    per_word = (tokens - alone) / len(candidates)
    words = f"{source}, about: {per_word:.2f} tokens a word"
    return Words(tuple(candidates), alone, words, is_exact=False, per_word=per_word)


async def _adds_up(asks: _Asks, words: Sequence[str], alone: int) -> bool:
    """In another order, too, the words are a token each."""
    mixed = random.Random(0).choices(words, k=2 * len(words))
    asks.most += 1
    return await asks.of(mixed) == alone + len(mixed)


class _Asks:
    def __init__(self, count: Count, most: int) -> None:
        self.most = most
        self._count = count
        self._num = 0

    async def of(self, words: Sequence[str]) -> int | None:
        if self._num >= self.most:
            return None
        self._num += 1
        return await self._count(" ".join([ANCHOR, *words]))
