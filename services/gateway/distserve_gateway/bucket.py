"""A token bucket whose charges may turn out smaller than they were."""

import math
from dataclasses import dataclass

SPAN_S = 60.0  # it holds what comes in during so long
_SLACK_S = 1e-6  # of rounding: what is said to be there in t seconds is there in t seconds


@dataclass(frozen=True, slots=True, eq=False)
class Charge:
    """An amount taken that may be corrected: settle() it once."""

    cost_s: float  # how long the bucket takes to regain it


class Bucket:
    """Regains `per_minute` in a minute, and holds no more than that. `now` is a monotonic time, s.

    The generic cell rate algorithm (ITU-T I.371): no level is kept but the time at which the bucket is full again. A
    charge that turns out smaller leaves the bucket as if it had been smaller from the first. To give its excess back
    without more ado would give too much: what a full bucket could not regain meanwhile it would not have regained
    either. So in any span of time T what was taken in it, as corrected, is at most per_minute x (1 + T / 60 s).

    A call takes time in proportion to the charges that are open: some 0.1 ms for a thousand.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._open: list[Charge] = []  # not settled, the oldest first
        # When it is full: [0] as things are, [i] had everything up to the i-th open charge, it included, not been.
        self._full_at = [-math.inf]

    def wait_s(self, amount: int, now: float) -> float:
        """Until so much is there, if nobody else takes any: 0 if it is now, infinite if it never can be."""
        if amount > self.per_minute:
            return math.inf
        wait = max(self._full_at[0], now) + self._cost(amount) - SPAN_S - now
        return wait if wait > _SLACK_S else 0.0

    def take(self, amount: int, now: float) -> Charge:
        """Take what wait_s() said is there."""
        charge = Charge(cost := self._cost(amount))
        self._full_at = [(at if at > now else now) + cost for at in self._full_at]
        self._full_at.append(-math.inf)
        self._open.append(charge)
        return charge

    def settle(self, charge: Charge, used: int) -> None:
        """So much of it was used, at most what was taken."""
        i = self._open.index(charge)
        excess = max(0.0, charge.cost_s - self._cost(used))
        least = self._full_at[i + 1]
        self._full_at[: i + 2] = [at if (at := was - excess) > least else least for was in self._full_at[: i + 1]]
        del self._open[i]

    def _cost(self, amount: int) -> float:
        return amount * SPAN_S / self.per_minute
