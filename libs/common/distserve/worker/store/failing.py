"""Sources that answer lookups and from which nothing comes."""

from __future__ import annotations

import time
from collections.abc import Callable

from distserve.errors import BlocksMissing, DistServeError, Draining, Overloaded, WorkerLost
from distserve.messages import TIERS
from distserve.worker.store.pauses import Pauses

# Said at once: these cost no time, and the next fetch may do.
_NO_FAULT = (BlocksMissing, Draining, Overloaded, WorkerLost)


class FailingTiers:
    """A source's tier from which a fetch has failed is left out for a while, and so are those below it: a disk that
    hangs says nothing of the memory above, and whatever keeps blocks in memory from coming keeps the disk's, too.
    """

    def __init__(
        self, present: Callable[[str], bool], *, fetch_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """present: whether a source is in the registry. fetch_s: a fetch's longest time."""
        self._present = present
        self._pauses: Pauses[tuple[str, int]] = Pauses(try_s=fetch_s, now=now)  # by source and place in TIERS

    def usable(self, source: str, tiers: bytes) -> int:
        """How many blocks, from the first on, are to be had of a source that has them in these tiers."""
        first_out = next((t for t in range(len(TIERS)) if (source, t) in self._pauses), len(TIERS))
        return next((i for i, tier in enumerate(tiers) if tier >= first_out), len(tiers))

    def trying(self, source: str, tiers: bytes) -> None:
        """They are about to be fetched. Whoever comes next leaves out what has failed before, until it is known."""
        for tier in range(max(tiers, default=-1) + 1):
            self._pauses.trying((source, tier))

    def failed(self, source: str, tiers: bytes, error: DistServeError) -> None:
        if self._present(source) and not isinstance(error, _NO_FAULT):
            self._pauses.failed((source, max(tiers)))

    def came(self, source: str, tiers: bytes) -> None:
        for tier in range(max(tiers) + 1):
            self._pauses.succeeded((source, tier))

    def forget(self, source: str) -> None:
        """It has left the registry."""
        self._pauses.forget(lambda key: key[0] == source)
