"""How fast blocks that are given to the store get there."""

import time
from collections.abc import Callable

from distserve.worker.store.client import StoreClient

_SHARE = 0.3  # of a new measurement
_LONGEST_S = 1.0  # of one


class OfferSpeed:
    """Bytes a second that offers carry while any is under way, whatever they wait for."""

    def __init__(self, client: StoreClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._since: float | None = None  # of this measurement; None: no offer is under way
        self._num_bytes = 0  # that had got there by then
        self.bytes_per_s = 0.0  # 0: not known

    def began(self) -> None:
        """An offer has begun."""
        if self._since is None:
            self._since, self._num_bytes = self._clock(), self._client.counts.num_offered_bytes

    def look(self) -> None:
        """An offer may have ended."""
        if self._since is None:
            return
        now, is_over = self._clock(), not self._client.num_offers
        seconds, num_bytes = now - self._since, self._client.counts.num_offered_bytes - self._num_bytes
        if not is_over and seconds < _LONGEST_S:
            return
        # None in a long time is slow; none in offers that have ended was not wanted, or failed.
        if seconds > 0 and (num_bytes or not is_over):
            rate = num_bytes / seconds
            self.bytes_per_s = rate if not self.bytes_per_s else (1 - _SHARE) * self.bytes_per_s + _SHARE * rate
        self._since = None if is_over else now
        self._num_bytes += num_bytes
