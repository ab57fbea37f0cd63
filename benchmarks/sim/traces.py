"""Made-up requests: when they come, how long they are, what they were promised. The same seed gives the same trace."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.sim.machines import Machine
from distserve.messages import Priority, Slo

LEAST, MOST = 32, 32_768  # tokens of a prompt
POWER = 0.8  # of the tail: 11 % are longer than 512, 0.8 % longer than 8,192 (a quarter of all tokens)
LONGEST_OUTPUT = 1024
BURST, QUIET, BURST_SHARE = 3.0, 0.5, 0.2  # times the mean rate, and the part of the time at the higher


NOTHING = Slo()


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_tokens: int  # of the prompt
    num_output_tokens: int = 1
    slo: Slo = NOTHING


@dataclass(frozen=True, slots=True)
class Promise:
    """First token within so many times what a prompt of 512 takes alone, and so many times what its own does. None:
    nothing."""

    share: float  # of all requests
    priority: Priority
    fixed: float | None = None
    own: float = 0.0

    def ttft_s(self, machine: Machine, num_tokens: int) -> float | None:
        if self.fixed is None:
            return None
        return self.fixed * machine.alone_s(512) + self.own * machine.alone_s(num_tokens)


MIX = (
    Promise(0.2, "vip", fixed=10, own=3),
    Promise(0.4, "normal", fixed=40, own=5),
    Promise(0.2, "normal"),
    Promise(0.2, "batch"),
)


def pareto(rng: random.Random, least: int = LEAST, most: int = MOST, power: float = POWER) -> int:
    """A power law cut off at both ends, by inversion of its distribution."""
    u = rng.random()
    return round(least * math.pow(1 - u * (1 - math.pow(least / most, power)), -1 / power))


def prompts(
    machine: Machine,
    load: float,
    num: int,
    seed: int,
    *,
    bursts: bool = False,
    mix: Sequence[Promise] = MIX,
) -> list[Arrival]:
    """`load`: of the work that the machine's fullest passes do; exact for the trace as a whole."""
    rng = random.Random(seed)
    lengths = [pareto(rng) for _ in range(num)]
    times = _scaled(list(_times(rng, num, bursts)), sum(map(machine.work_s, lengths)) / load)
    drawn = rng.choices(mix, [promise.share for promise in mix], k=num)
    return [
        Arrival(at_s, length, slo=Slo(priority=promise.priority, ttft_s=promise.ttft_s(machine, length)))
        for at_s, length, promise in zip(times, lengths, drawn, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Pace:
    """A token every `steps` times a full step of the machine, at most. None: nothing is promised."""

    share: float
    priority: Priority
    steps: float | None = None


PACES = (Pace(0.1, "vip", 0.8), Pace(0.3, "normal", 1.2), Pace(0.3, "normal", 2.5), Pace(0.3, "batch"))


def answers(
    machine: Machine, load: float, num: int, seed: int, *, bursts: bool = False, paces: Sequence[Pace] = PACES
) -> list[Arrival]:
    """For a decode worker: prompts as above, of 2,048 tokens at most, and answers of 200 tokens on average. `load`: of
    the tokens a second that full steps give."""
    rng = random.Random(seed)
    lengths = [pareto(rng, most=2048) for _ in range(num)]
    outputs = [2 + min(LONGEST_OUTPUT, int(rng.expovariate(1 / 200))) for _ in range(num)]
    context = sum(n * (p + n / 2) for n, p in zip(outputs, lengths, strict=True)) / sum(outputs)
    step_s = machine.decode.seconds(machine.max_num_seqs, machine.max_num_seqs * context)
    times = _scaled(list(_times(rng, num, bursts)), sum(outputs) * step_s / machine.max_num_seqs / load)
    drawn = rng.choices(paces, [pace.share for pace in paces], k=num)
    return [
        Arrival(at_s, p, n, Slo(priority=pace.priority, tpot_s=None if pace.steps is None else pace.steps * step_s))
        for at_s, p, n, pace in zip(times, lengths, outputs, drawn, strict=True)
    ]


def _times(rng: random.Random, num: int, bursts: bool) -> Iterator[float]:
    """A Poisson process of rate 1; with bursts, of two rates in turn, for spans that are exponential too."""
    at, change, rate = 0.0, 0.0 if bursts else float("inf"), QUIET if bursts else 1.0
    for _ in range(num):
        gap = rng.expovariate(1.0)
        while at + gap / rate > change:
            gap -= (change - at) * rate
            at = change
            rate = BURST if rate == QUIET else QUIET
            change += rng.expovariate(1.0) * 500 * (BURST_SHARE if rate == BURST else 1 - BURST_SHARE)
        at += gap / rate
        yield at


def _scaled(times: Sequence[float], span: float) -> list[float]:
    return [t * span / times[-1] for t in times]
