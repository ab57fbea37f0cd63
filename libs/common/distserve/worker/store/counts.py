"""What came of a worker's dealings with the store. Counts only grow."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from distserve.messages import Tier


@dataclass(slots=True)
class StoreCounts:
    num_lookups: int = 0
    num_silent: int = 0  # nodes and workers that had not answered in time
    num_sought_blocks: int = 0
    num_hit_blocks: Counter[Tier] = field(default_factory=Counter)
    num_fetches: int = 0  # of one source each
    num_fetched_blocks: int = 0
    num_fetched_bytes: int = 0
    fetch_seconds: float = 0.0  # of those that came
    num_failed_fetches: Counter[str] = field(default_factory=Counter)  # by error code
    num_offered_blocks: int = 0  # that a node has taken
    num_offered_bytes: int = 0
    num_unwanted_blocks: int = 0  # that a node had already
    num_dropped_blocks: Counter[str] = field(default_factory=Counter)  # not offered, or in vain: "full" or error code
    num_served_blocks: int = 0  # of our pool, to others
    num_served_bytes: int = 0
    num_failed_serves: Counter[str] = field(default_factory=Counter)  # by error code
    num_event_messages: int = 0

    def snapshot(self) -> StoreCounts:
        """A copy that goes on changing no more."""
        return copy.deepcopy(self)
