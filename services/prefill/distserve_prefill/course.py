"""What becomes of a worker's queue if nothing else comes: pass after pass, by the rules by which they are made up."""

import math
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush

from distserve.messages import PassSpeed, pairs
from distserve_prefill.order import Flow, Place, Rules, settle
from distserve_prefill.packing import OpenGate, by_flow, fill
from distserve_prefill.shares import Shares

# Passes that are gone through one by one; what is left then is taken one prompt after the other. The more prompts there
# are the fewer: who asks holds up the event loop.
MOST_PASSES = 128
LEAST_PASSES = 16
_STEPS = 2048  # passes by prompts
_SAME_S = 1e-7  # a pass that ends so soon has ended


class Course:
    """Owns its copies of places and shares. It supposes that there are blocks for everybody, that passes take what they
    did so far, and that each prompt is computed as far as it has to be now. `at`: the time of which it speaks."""

    def __init__(
        self, rules: Rules, speed: PassSpeed, places: Iterable[Place], shares: Shares, at: float, busy_until: float
    ) -> None:
        """places: all that have joined the shares, those that the pass under way ends included."""
        self.rules = rules
        self.speed = speed
        self.at = at
        self.busy_until = busy_until  # when the pass under way ends
        self.most_passes = MOST_PASSES
        self.ends: dict[tuple[float, int], float] = {}  # of prompts by Place.arrived: when the last pass of each did
        self._shares = shares
        mine = [place.copy() for place in places]
        self._line = sorted((p for p in mine if p.left), key=rules.key)
        self._ending = [p for p in mine if not p.left]  # with the pass under way
        self._most: Counter[Flow] = Counter()
        for place in self._line:
            self._most[place.flow] += rules.most(place)
        # Promises, by the time until which each can be kept as things stood when that was last looked at.
        self._kept = [(-math.inf, p.arrived, p) for p in self._line if p.keeps]
        heapify(self._kept)
        if self._line:
            self.most_passes = max(LEAST_PASSES, min(MOST_PASSES, _STEPS // len(self._line)))
        self._awaited: set[tuple[float, int]] = set()

    def copy(self) -> "Course":
        everybody = (*self._line, *self._ending)
        other = Course(self.rules, self.speed, everybody, self._shares.copy(), self.at, self.busy_until)
        other.ends, other.most_passes = dict(self.ends), self.most_passes
        return other

    @property
    def places(self) -> list[Place]:
        """What no pass has taken up wholly, in order."""
        return self._line

    def add(self, place: Place) -> None:
        """It comes now."""
        place = place.copy()
        insort(self._line, place, key=self.rules.key)
        self._shares.join(place.flow)
        self._most[place.flow] += self.rules.most(place)
        if place.keeps:
            heappush(self._kept, (-math.inf, place.arrived, place))

    def run_to(self, at: float) -> bool:
        """Go on until then; a pass that would begin just then has begun. False: that is too far ahead."""
        for _ in range(self.most_passes):
            if self.busy_until > at + _SAME_S or not self._next_pass():
                self.at = at
                return True
        return False

    def run(self, until: Collection[tuple[float, int]] = ()) -> None:
        """Go on until these prompts have ended, or all."""
        self._awaited = set(until) - self.ends.keys()
        for _ in range(self.most_passes):
            if (until and not self._awaited) or not self._next_pass():
                return
        self._end_pass()
        for place in self._line:
            self.busy_until += self.rules.alone_s(self.speed, place.left, place.done)
            self.ends[place.arrived] = self.busy_until
            self._shares.leave(place.flow)
        self._line = []

    def _end_pass(self) -> None:
        for place in self._ending:
            self.ends[place.arrived] = self.busy_until
            self._awaited.discard(place.arrived)
            self._shares.leave(place.flow)
        self._ending = []

    def _settle(self, now: float) -> None:
        """As order.settle() does before each pass, of those alone that may be late by now."""
        kept = []
        while self._kept and self._kept[0][0] <= now + _SAME_S:
            _, _, place = heappop(self._kept)
            if not place.left:
                continue
            until = settle((place,), self.rules, self.speed, now)
            if place.keeps:
                kept.append((until, place.arrived, place))
            else:
                self._line.remove(place)
                insort(self._line, place, key=self.rules.key)
        for one in kept:
            heappush(self._kept, one)

    def _next_pass(self) -> bool:
        """The pass under way ends and the next one begins. False: there is nothing more to compute."""
        self._end_pass()
        if not self._line:
            return False
        now, rules = self.busy_until, self.rules
        if rules.fair:
            self._settle(now)
        owed = self._shares.owed(rules.pass_tokens) if rules.fair else []
        taken = fill(self._line, owed, rules, now, OpenGate())
        self._shares.serve(by_flow(taken), self._most)
        num_pairs = 0.0
        for place, num in taken.items():
            self._most[place.flow] -= rules.most(place)
            num_pairs += pairs(num, place.done)
            place.left -= num
            place.done += num
            self._most[place.flow] += rules.most(place)
            if not place.left:
                self._line.remove(place)
                self._ending.append(place)
        self.busy_until = now + self.speed.seconds(sum(taken.values()), num_pairs)
        return True
