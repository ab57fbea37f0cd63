"""Fair shares of a worker's service: the guard under earliest due first.

Start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM '96), of which only the virtual time
is needed: it grows by the tokens of each pass over the weights of the flows that have something to compute. A flow's
tag is the virtual time up to which it had its share, so

    lag = weight * (virtual time - tag)      tokens that it was short of its share since it has something to compute

What a flow had beyond its share is not held against it later: a tag is never ahead of virtual time. A flow of which
every prompt had all that a pass may take of it lacks nothing. One that lags more than LAG_PASSES goes first in each
pass, with its share of the pass rounded up to a block. So no flow lags more than

    LAG_PASSES passes + one pass + a block for each flow
"""

from collections.abc import Mapping

from distserve.messages import Priority
from distserve_prefill.order import Flow

LAG_PASSES = 4


class Shares:
    def __init__(self, weights: Mapping[Priority, int]) -> None:
        self._weights = weights
        self._virtual = 0.0
        self._tags: dict[Flow, float] = {}
        self._num: dict[Flow, int] = {}  # prompts of the flow that are not wholly computed, never 0

    def copy(self) -> "Shares":
        other = Shares(self._weights)
        other._virtual, other._tags, other._num = self._virtual, dict(self._tags), dict(self._num)
        return other

    def join(self, flow: Flow) -> None:
        """One prompt more has something to compute."""
        if flow not in self._num:
            self._tags[flow] = self._virtual
        self._num[flow] = self._num.get(flow, 0) + 1

    def leave(self, flow: Flow) -> None:
        """One of those that joined is wholly computed, or gone."""
        self._num[flow] -= 1
        if not self._num[flow]:
            del self._num[flow], self._tags[flow]

    def lag(self, flow: Flow) -> float:
        """Of one that has something to compute."""
        return self._weights[flow.priority] * (self._virtual - self._tags[flow])

    def owed(self, pass_tokens: int) -> list[tuple[Flow, float]]:
        """Those that go first in the next pass, and with how many tokens; the one that lags most before the others."""
        lags = [(lag, flow) for flow in self._num if (lag := self.lag(flow)) > LAG_PASSES * pass_tokens]
        if not lags:
            return []
        unit = pass_tokens / self._weight()
        lags.sort(reverse=True)
        return [(flow, self._weights[flow.priority] * unit) for _, flow in lags]

    def serve(self, taken: Mapping[Flow, int], most: Mapping[Flow, int]) -> None:
        """A pass takes up so many tokens of each flow; `most`: what it could have taken of each that joined."""
        total = sum(taken.values())
        if not total:
            return
        step = total / self._weight()
        self._virtual += step
        for flow in self._num:
            weight = self._weights[flow.priority]
            had = taken.get(flow, 0) + max(0.0, weight * step - most.get(flow, 0))
            self._tags[flow] = min(self._virtual, self._tags[flow] + had / weight)

    def _weight(self) -> int:
        return sum(self._weights[flow.priority] for flow in self._num)
