"""How service is shared among flows, beside what their weights say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from distserve.messages import Priority

Flow = tuple[Priority, int]  # and the number of the bucket
BUCKETS = (512, 2048, 8192)  # tokens to compute, at most; one more bucket for more
NAMES = ("<= 512", "<= 2,048", "<= 8,192", "more")
WEIGHTS: Mapping[Priority, int] = {"vip": 8, "normal": 4, "batch": 1}


def bucket_of(num_tokens: int) -> int:
    return sum(num_tokens > most for most in BUCKETS)


def jain(values: Iterable[float]) -> float:
    """1: all alike; 1/n: one has everything (Jain, Chiu and Hawe, DEC-TR-301, 1984). 1 of nothing."""
    found = list(values)
    squares = sum(v * v for v in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


class Shares:
    """Tokens that flows had, and would have had by weight, while they had something to compute."""

    def __init__(self, weights: Mapping[Priority, int] = WEIGHTS) -> None:
        self._weights = weights
        self.had: dict[Flow, float] = defaultdict(float)
        self.due: dict[Flow, float] = defaultdict(float)
        self._lag: dict[Flow, float] = {}  # since the flow became backlogged
        self._least_lag: dict[Flow, float] = {}
        self.worst_lag = 0.0  # tokens that a flow was short of its share over any stretch while it was backlogged

    def note(self, served: Mapping[Flow, int], most: Mapping[Flow, int]) -> None:
        """A pass has computed so many tokens of each flow; `most`: of each that had some to compute as it began, how
        many a pass could have taken: prompts are cut into chunks. More is not due to it."""
        total = sum(served.values())
        weights = sum(self._weights[flow[0]] for flow in most)
        for flow in [f for f in self._lag if f not in most]:
            del self._lag[flow], self._least_lag[flow]
        for flow in most:
            due, had = min(most[flow], total * self._weights[flow[0]] / weights), served.get(flow, 0)
            self.had[flow] += had
            self.due[flow] += due
            lag = self._lag.get(flow, 0.0) + due - had
            least = self._least_lag.get(flow, 0.0)
            self.worst_lag = max(self.worst_lag, lag - least)
            self._lag[flow], self._least_lag[flow] = lag, min(least, lag)

    @property
    def jain(self) -> float:
        """Over what flows had, of what was due to them. More than was due counts as that: nobody lacked it."""
        return jain(min(1.0, self.had[flow] / due) for flow, due in self.due.items() if due)
