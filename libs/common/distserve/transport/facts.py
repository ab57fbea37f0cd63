"""What a transfer was, told to who traces it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from distserve.messages import TrafficClass


@dataclass(frozen=True, slots=True)
class TransferFacts:
    """As far as it has come. `dscp`: what its class is marked with, wherever it goes by packets. `num_bytes`: 0 until
    it is adopted.

    `wait_s`: from the call of open() until its first byte could move: the connection was there, and over rdma the
    receiver had memory bound for it, which it may have had to wait for. `wire_s`: the time in which this side was busy
    with its bytes, and from the end of those until the receiver had verified and adopted them; between two spans that
    are computed one after the other nothing moves. Over shm the receiver moves the bytes, and what it has copied before
    the commit is not in it.
    """

    kind: str  # of the transport
    traffic_class: TrafficClass
    dscp: int
    num_blocks: int
    num_bytes: int = 0
    wait_s: float = 0.0
    wire_s: float = 0.0


class Course:
    """A transfer's facts while it goes on. For one thread."""

    def __init__(self, facts: TransferFacts, asked_at: float) -> None:
        """facts: what is known of it from the beginning. asked_at: the call of open(), on the monotonic clock."""
        self.facts = facts
        self._asked_at = asked_at
        self._wait_s: float | None = None
        self._num_moving = 0
        self._since = 0.0
        self._wire_s = 0.0

    def may_move(self) -> None:
        """Its bytes could move from now on. The first time counts."""
        if self._wait_s is None:
            self._wait_s = time.monotonic() - self._asked_at

    def begin(self) -> None:
        """Some of it is under way, until end()."""
        if not self._num_moving:
            self._since = time.monotonic()
        self._num_moving += 1

    def end(self) -> None:
        """Without effect after stop()."""
        if self._num_moving == 1:
            self._wire_s += time.monotonic() - self._since
        self._num_moving = max(0, self._num_moving - 1)

    def stop(self) -> None:
        """Nothing is under way any more."""
        self._num_moving = min(1, self._num_moving)
        self.end()

    def ended(self, num_bytes: int) -> TransferFacts:
        """All of them. num_bytes: that were adopted."""
        self.may_move()
        self.stop()
        return replace(self.facts, num_bytes=num_bytes, wait_s=self._wait_s or 0.0, wire_s=self._wire_s)
