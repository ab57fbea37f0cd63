"""Which of those that run step in the next pass.

All of them, unless somebody was promised its tokens sooner than a step of all takes. Then a pass is kept as short as
the tightest promise that can be kept so, and those who can wait are passed over: each steps as often as its own promise
asks (earliest deadlines first: Liu and Layland, JACM 1973, with passes for a processor), and after MAX_SKIPS passes
without it at the latest. A promise that not even that would keep shortens nothing: passing over costs all throughput.

Pure arithmetic. Where nobody was promised anything, it costs a look at an empty dict.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distserve.engine.sequence import Sequence as Running
from distserve.messages import Slo
from distserve_decode.speeds import Speeds

MAX_SKIPS = 3

# Of a promise, what a pass may take by the model of passes. The rest is for what the model can't know, and for what
# lies between two passes.
SHARE = 0.9

# Between two tokens of one that was promised nothing.
_PERIOD_S = 1.0
_BATCH_PERIOD_S = 4.0


def period_s(slo: Slo) -> float:
    """From a token to when the next one is due."""
    if slo.tpot_s is not None:
        return slo.tpot_s
    return _BATCH_PERIOD_S if slo.priority == "batch" else _PERIOD_S


@dataclass(frozen=True, slots=True)
class Step:
    """One that could step. cost_s: of a pass with it, beyond one without."""

    cost_s: float
    period_s: float
    due_at: float  # its next token
    num_left: int  # tokens that it is expected to go on for
    num_skips: int = 0  # passes in a row that went by without it
    is_new: bool = False


def attainable_s(steps: Sequence[Step], pass_s: float, promises: Sequence[float]) -> float | None:
    """The tightest of these promises that passes of no more than that can keep, each with those that are due; None:
    none of them. pass_s: of a pass, whatever is in it."""

    def overload(limit_s: float) -> float:
        work_s = sum(s.cost_s / min(max(s.period_s, limit_s), (MAX_SKIPS + 1) * limit_s) for s in steps)
        return pass_s / limit_s + work_s - SHARE

    if not promises or overload(promises[-1]) > 0:
        return None
    low, high = 0, len(promises) - 1  # the looser, the less there is to do
    while low < high:
        middle = (low + high) // 2
        if overload(promises[middle]) > 0:
            low = middle + 1
        else:
            high = middle
    return promises[low]


def chosen(steps: Sequence[Step], pass_s: float, limit_s: float, now: float) -> list[int]:
    """Places, ascending, of those that step in a pass of about limit_s: first who was passed over often enough, then
    who has not stepped yet, then who is due first, in units of a pass, then who is done soonest."""

    def order(i: int) -> tuple[bool, bool, int, int]:
        step = steps[i]
        slack = math.floor((step.due_at - now) / limit_s)
        return step.num_skips < MAX_SKIPS, not step.is_new, slack, step.num_left

    least = -(-len(steps) // (MAX_SKIPS + 1))  # with fewer, all would have to step at once some time
    left_s = SHARE * limit_s - pass_s
    taken: list[int] = []
    for i in sorted(range(len(steps)), key=order):
        left_s -= steps[i].cost_s
        if left_s < 0 and len(taken) >= least and steps[i].num_skips < MAX_SKIPS:
            break
        taken.append(i)
    return sorted(taken)


@dataclass(slots=True)
class _PassedOver:
    since: float  # its last token
    num: int = 0


class Steps:
    """Those that run, and how they fare."""

    def __init__(self, speeds: Speeds, num_left: Callable[[Running], int]) -> None:
        """num_left: tokens that one is expected to go on for."""
        self._speeds = speeds
        self._num_left = num_left
        self._slos: dict[Running, Slo] = {}
        self._promised: dict[Running, float] = {}  # tpot_s
        self._new: set[Running] = set()
        self._passed_over: dict[Running, _PassedOver] = {}
        self._last_at = -math.inf  # when the last pass ended: who was not passed over has had its token then
        self.num_passed_over = 0

    def add(self, sequence: Running, slo: Slo) -> None:
        self._slos[sequence] = slo
        self._new.add(sequence)
        if slo.tpot_s is not None:
            self._promised[sequence] = slo.tpot_s

    def discard(self, sequence: Running) -> None:
        """It runs no more, if it did."""
        self._slos.pop(sequence, None)
        self._promised.pop(sequence, None)
        self._new.discard(sequence)
        self._passed_over.pop(sequence, None)

    def note_pass(self, now: float) -> None:
        self._last_at = now

    def choose(self, able: list[Running], now: float) -> tuple[list[Running], float]:
        """Of these, in their order, those that should step now, one at least; and what the pass may take, with all
        that is in it, for a promise's sake: inf if there is none that can be kept. begin() says who does step."""
        if not self._promised:
            return able, math.inf
        promises = sorted({p for s in able if (p := self._promised.get(s)) is not None})
        speed = self._speeds.steps.speed
        if not promises or not speed.known:
            return able, math.inf
        all_s = speed.seconds(len(able), sum(s.num_computed_tokens for s in able))
        if all_s <= SHARE * promises[0]:
            return able, SHARE * promises[0]
        if len(able) > self._speeds.most_steps:  # nobody knows what that takes: this pass will tell
            return able, math.inf
        steps = [self._step(s, speed.token_s + speed.pair_s * s.num_computed_tokens) for s in able]
        limit_s = attainable_s(steps, speed.pass_s, promises)
        if limit_s is None or all_s <= SHARE * limit_s:
            return able, math.inf if limit_s is None else SHARE * limit_s
        return [able[i] for i in chosen(steps, speed.pass_s, limit_s, now)], SHARE * limit_s

    def begin(self, able: list[Running], stepping: list[Running]) -> None:
        """A pass does, with these steps. able: all that could."""
        if self._passed_over:
            for sequence in stepping:
                self._passed_over.pop(sequence, None)
        if self._new:
            self._new.difference_update(stepping)
        if len(stepping) == len(able):
            return
        for sequence in set(able).difference(stepping):
            self._passed_over.setdefault(sequence, _PassedOver(self._last_at)).num += 1
            self.num_passed_over += 1

    def _step(self, sequence: Running, cost_s: float) -> Step:
        over = self._passed_over.get(sequence)
        period = period_s(self._slos[sequence])
        return Step(
            cost_s=cost_s,
            period_s=period,
            due_at=(self._last_at if over is None else over.since) + period,
            num_left=self._num_left(sequence),
            num_skips=0 if over is None else over.num,
            is_new=sequence in self._new,
        )
