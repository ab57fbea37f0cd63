"""Whose turn it is among the prompts of a worker, and how much of each a pass may take. Pure: the clock is passed in.

Earliest due first (Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment",
JACM 20(1), 1973), over prompts that wait and those that are partly computed:

    promised      due = receipt + what was promised
    not promised  due = receipt + a span by class and its own time to be computed (worker/due.py)
    late          its promise can't be kept even alone: due as one that was promised nothing and came just now

Whoever comes later is due later but for what was promised to it or how short it is, by a bounded time: so nobody is
passed over for ever.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from distserve.messages import PassSpeed, Priority, pairs
from distserve.worker.due import stands_back_s

PRIORITIES: tuple[Priority, ...] = ("vip", "normal", "batch")  # the highest first
BUCKETS = (512, 2048, 8192)  # tokens to compute, at most; one more bucket for more


class Flow(NamedTuple):
    """Prompts that share the worker's service with those of other flows by weight (shares.py)."""

    priority: Priority
    bucket: int


def bucket_of(num_tokens: int) -> int:
    """The number of the bucket, by what is to be computed of a prompt."""
    return bisect_left(BUCKETS, num_tokens)


@dataclass(slots=True, eq=False)
class Place:
    """One prompt's place. Times are on the scheduler's clock."""

    flow: Flow
    due: float
    promised: float  # what was promised to it; inf: nothing
    arrived: tuple[float, int]  # when it was received, and a number of its own among those
    left: int  # tokens that no pass has taken up yet
    done: int  # tokens before those
    begun: float = math.inf  # when its first chunk was taken up; inf: it waits, and holds no blocks
    served: float = math.inf  # when its last one was

    def copy(self) -> "Place":
        return Place(self.flow, self.due, self.promised, self.arrived, self.left, self.done, self.begun, self.served)

    @property
    def hurries(self) -> bool:
        """It should be let in soon: long passes would be in its way."""
        return self.promised < math.inf or self.flow.priority == "vip"

    @property
    def keeps(self) -> bool:
        """Something was promised to it, and that may still be kept."""
        return self.due == self.promised < math.inf


@dataclass(frozen=True, slots=True)
class Rules:
    """How passes are made up. fair: earliest due first and fair shares, else first come, first served: those that have
    begun, then by arrival. chunk_tokens: of one prompt in a pass, a multiple of block_size; 0: prompts are not cut, and
    one that is longer than a pass runs alone. longest_pause_s: after so long without a chunk one that has begun goes
    first, with a block."""

    fair: bool
    pass_tokens: int
    chunk_tokens: int
    block_size: int
    longest_pause_s: float = math.inf

    def key(self, place: Place) -> tuple[float, float, int]:
        """The smallest goes first."""
        return (place.due if self.fair else place.begun, *place.arrived)

    def most(self, place: Place) -> int:
        """Tokens of it in one pass, at most."""
        return min(place.left, self.chunk_tokens, self.pass_tokens) if self.chunk_tokens else place.left

    def fits(self, place: Place, room: int, *, alone: bool) -> int:
        """Tokens of it that a pass with so much room takes. A chunk that is not its last ends on a block's edge."""
        if not self.chunk_tokens:
            return place.left if place.left <= room or alone else 0
        room = min(room, self.chunk_tokens)
        if place.left <= room:
            return place.left
        return max(0, (place.done + room) // self.block_size * self.block_size - place.done)

    def alone_s(self, speed: PassSpeed, num_new: int, num_cached: int) -> float:
        """To compute num_new tokens that follow num_cached if there is nothing else; 0 if the speed isn't known."""
        most = min(self.chunk_tokens, self.pass_tokens) if self.chunk_tokens else num_new
        num_more = -(-max(0, num_new - most) // max(self.block_size, most // self.block_size * self.block_size))
        return num_more * speed.pass_s + speed.seconds(num_new, pairs(num_new, num_cached))


def settle(places: Iterable[Place], rules: Rules, speed: PassSpeed, now: float) -> float:
    """Before a pass: promises that can't be kept any more are none from now on. Gives the time until which the rest can
    all be kept."""
    until = math.inf
    for place in places:
        if place.keeps:
            own_s = rules.alone_s(speed, place.left, place.done)
            if now + own_s > place.due:
                place.due = now + stands_back_s(place.flow.priority, own_s)
            else:
                until = min(until, place.due - own_s)
    return until
