"""What one pass takes of which prompts. Used alike for the pass that is run and for those that are foreseen."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from distserve_prefill.order import Flow, Place, Rules


class Gate(Protocol):
    """Through which prompts that wait go to be computed."""

    def enter(self, place: Place) -> Place | None:
        """Its turn has come: itself if it may be taken, another that is to be taken in its stead, or None: there is no
        room for it, and so none for those behind it."""

    def put_back(self, place: Place) -> None:
        """It has entered, and the pass can take nothing of it."""


class OpenGate:
    """There is room for everybody."""

    def enter(self, place: Place) -> Place | None:
        return place

    def put_back(self, place: Place) -> None: ...


def fill(
    ranked: Sequence[Place], owed: Sequence[tuple[Flow, float]], rules: Rules, now: float, gate: Gate
) -> dict[Place, int]:
    """Tokens of each prompt that the next pass takes: first of those that have paused too long, then what flows are
    owed, then in order. Those that begin with it, and those that go on, are marked so; nothing else about a place
    changes."""
    packing = _Packing(rules, now, gate)
    last = now - rules.longest_pause_s
    for paused in [place for place in ranked if place.served <= last]:
        packing.take((paused,), rules.block_size)
    for flow, num_tokens in owed:
        packing.take((place for place in ranked if place.flow == flow), math.ceil(num_tokens))
    packing.take(ranked, rules.pass_tokens)
    return packing.taken


def by_flow(taken: Mapping[Place, int]) -> Counter[Flow]:
    num: Counter[Flow] = Counter()
    for place, num_tokens in taken.items():
        num[place.flow] += num_tokens
    return num


class _Packing:
    def __init__(self, rules: Rules, now: float, gate: Gate) -> None:
        self.taken: dict[Place, int] = {}
        self._rules = rules
        self._now = now
        self._gate = gate
        self._num_free = rules.pass_tokens
        self._closed = False  # for those that wait

    def take(self, places: Iterable[Place], num_tokens: int) -> None:
        """Up to so many tokens more, rounded up to a block, of these in this order."""
        block_size, stop = self._rules.block_size, self._num_free - num_tokens
        for place in places:
            room = min(self._num_free, -(-(self._num_free - stop) // block_size) * block_size)
            if room <= 0:
                return
            taker = place if place.begun < math.inf else self._let_in(place)
            if taker is None:
                continue
            had = self.taken.get(taker, 0)
            num = self._rules.fits(taker, had + room, alone=not self.taken) - had
            if num > 0:
                self.taken[taker] = had + num
                self._num_free -= num
                taker.begun, taker.served = min(taker.begun, self._now), self._now
            elif taker.begun == math.inf:  # the next pass may find more of it in the pool
                self._gate.put_back(taker)
                self._closed = True

    def _let_in(self, place: Place) -> Place | None:
        taker = None if self._closed else self._gate.enter(place)
        self._closed = self._closed or taker is None
        return taker
