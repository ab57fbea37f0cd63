"""A sequence's place among those that wait."""

from dataclasses import dataclass, field

from distserve.messages import Slo
from distserve.worker.due import RANKS


@dataclass(slots=True, eq=False)
class Standing:
    """`order`: who waits goes in it; by when its next token is due, seconds on the scheduler's clock, or by turn, then
    by arrival. `num_found`: tokens of its beginning that the pool held when it came. `was_sought`: preempted, and what
    others hold of it has been fetched. `num_passed`: leases that were granted while it was the first to wait."""

    slo: Slo
    order: tuple[float, int]
    num_found: int = 0
    rank: int = field(init=False)  # by its class: the last ones are preempted first
    was_sought: bool = False
    num_passed: int = 0

    def __post_init__(self) -> None:
        self.rank = RANKS[self.slo.priority]
