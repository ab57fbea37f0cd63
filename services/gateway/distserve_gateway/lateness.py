"""How late first tokens are, second by second: the P99 of those that came, and of those still waited for."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from distserve.messages import Priority

EVERYBODY: frozenset[Priority] = frozenset(get_args(Priority))


def p99(values: Sequence[float]) -> float | None:
    """The nearest rank: the smallest value that at most 1 % of them are over. None of none."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else None


@dataclass(slots=True, eq=False)
class Wait:
    """A request that has no token yet. `began`: its receipt, by the clock of whoever calls Lateness, s."""

    began: float
    priority: Priority


class Lateness:
    """A wait counts in the second in which it ends, and in each before it in which it is over `limit_s` already."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._waits: dict[Wait, None] = {}
        self._ended: list[tuple[Priority, float]] = []  # in this second, s

    def __len__(self) -> int:
        """Waits that have not ended."""
        return len(self._waits)

    def begin(self, began: float, priority: Priority) -> Wait:
        wait = Wait(began, priority)
        self._waits[wait] = None
        return wait

    def end(self, wait: Wait, waited_s: float) -> None:
        """Its first token has come after so long; inf: none will. Nothing, if it has ended or was forgotten."""
        if wait in self._waits:
            del self._waits[wait]
            self._ended.append((wait.priority, waited_s))

    def drop(self, wait: Wait) -> None:
        """It says nothing more: its client is gone. Idempotent."""
        self._waits.pop(wait, None)

    def forget(self) -> None:
        """All that was waited for until now: it is known to be late."""
        self._waits.clear()
        self._ended.clear()

    def second(self, now: float, counted: Collection[Priority] = EVERYBODY) -> float | None:
        """Ends a second: the P99 in it, s, over those of the `counted` classes; None if nothing came and nobody waits
        for too long."""
        ended, self._ended = self._ended, []
        waited = [waited_s for priority, waited_s in ended if priority in counted]
        waiting = [now - wait.began for wait in self._waits if wait.priority in counted]
        return p99(waited + [age_s for age_s in waiting if age_s > self.limit_s])
