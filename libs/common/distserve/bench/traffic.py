"""What is asked, and when: a pure function of the traffic's fields, its seed among them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from distserve.bench.arrivals import constant, poisson
from distserve.bench.lengths import Fixed, Lengths
from distserve.bench.trace import Entry

Arrival = Literal["poisson", "constant", "closed", "trace"]
INPUT, OUTPUT = Fixed(512), Fixed(128)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `at_s`: when it is due after the beginning; 0 in a closed loop, where it is due when there is room.
    `blocks`: names of the blocks of 512 tokens that the prompt begins with; `name`: of everything else in it. Texts are
    made of the names alone."""

    index: int
    at_s: float
    num_input: int
    num_output: int
    name: str
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Traffic:
    """`rate_hz`: of poisson and constant. `concurrency`: of closed. `trace`, `speed`: of trace, whose pauses are
    divided by `speed`. `part`: which of several stretches of the same kind, alike but not equal."""

    arrival: Arrival
    seed: int = 0
    rate_hz: float = 0.0
    concurrency: int = 0
    input: Lengths = INPUT
    output: Lengths = OUTPUT
    trace: tuple[Entry, ...] = ()
    speed: float = 1.0
    part: int = 0

    @property
    def is_open(self) -> bool:
        """Requests come whatever becomes of those before."""
        return self.arrival != "closed"

    def asks(self) -> Iterator[Ask]:
        """Without end, unless of a trace. The first ones do not depend on how many are taken."""
        if self.arrival == "trace":
            for i, entry in enumerate(self.trace):
                at_s = (entry.at_s - self.trace[0].at_s) / self.speed
                blocks = tuple(f"{self.seed} block {block}" for block in entry.blocks)  # shared by all parts
                yield Ask(i, at_s, entry.num_input, entry.num_output, self._name(i), blocks)
            return
        lengths = self._rng("lengths")
        for i, at_s in zip(itertools.count(), self._times(), strict=False):
            yield Ask(i, at_s, self.input.draw(lengths), self.output.draw(lengths), self._name(i))

    def parts(self, num: int) -> list[Traffic]:
        """So many stretches, for slices of a comparison: a trace in consecutive ones, else of seeds of their own."""
        if self.arrival != "trace":
            return [replace(self, part=part) for part in range(num)]
        bounds = [len(self.trace) * i // num for i in range(num + 1)]
        cut = [self.trace[first:last] for first, last in itertools.pairwise(bounds)]
        return [replace(self, trace=entries, part=part) for part, entries in enumerate(cut)]

    def __str__(self) -> str:
        words = {
            "poisson": f"open loop, Poisson, {self.rate_hz:g} requests/s",
            "constant": f"open loop, constant, {self.rate_hz:g} requests/s",
            "closed": f"closed loop, {self.concurrency} at once",
            "trace": f"trace of {len(self.trace)} requests at {self.speed:g} times its speed",
        }[self.arrival]
        lengths = "" if self.arrival == "trace" else f"; input {self.input}, output {self.output}"
        return f"{words}{lengths}; seed {self.seed}"

    def _times(self) -> Iterator[float]:
        match self.arrival:
            case "poisson":
                return poisson(self._rng("arrivals"), self.rate_hz)
            case "constant":
                return constant(self.rate_hz)
            case _:
                return itertools.repeat(0.0)

    def _rng(self, of: str) -> random.Random:
        return random.Random(f"{self.seed} {self.part} {of}")  # a text is hashed alike in every process

    def _name(self, index: int) -> str:
        return f"{self.seed} {self.part} {index}"
