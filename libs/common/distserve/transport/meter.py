"""Bytes and seconds by direction, transport, traffic class and peer: what a process's transfers have come to."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from distserve.messages import TrafficClass
from distserve.transport.packets import PacketCounts

Direction = Literal["sent", "received"]


@dataclass(frozen=True, slots=True)
class Flow:
    """What is counted together."""

    direction: Direction
    kind: str  # of the transport
    traffic_class: TrafficClass
    peer: str  # the other worker's id; of one that is sent to without being named, its address


@dataclass(slots=True)
class Tally:
    num_leases: int = 0
    num_bytes: int = 0
    seconds: float = 0.0  # of each lease, from open (sent) or grant (received) to its commit, summed


class Meter:
    """Thread-safe. Senders and receivers of every kind add to one; the worker's metrics read it. `packets`: what that
    has taken on the network."""

    def __init__(self) -> None:
        self.packets = PacketCounts()
        self._lock = threading.Lock()
        self._tallies: dict[Flow, Tally] = {}

    def add(self, flow: Flow, num_bytes: int, seconds: float) -> None:
        with self._lock:
            tally = self._tallies.setdefault(flow, Tally())
            tally.num_leases += 1
            tally.num_bytes += num_bytes
            tally.seconds += seconds

    def add_bytes(self, flow: Flow, num_bytes: int) -> None:
        """Bytes of a lease that is counted elsewhere: over rdma, the part that went in another class than its own."""
        with self._lock:
            self._tallies.setdefault(flow, Tally()).num_bytes += num_bytes

    def forget(self, peer: str) -> None:
        """It has left the registry: its counts go, or there would be one for every worker that ever lived."""
        with self._lock:
            for flow in [flow for flow in self._tallies if flow.peer == peer]:
                del self._tallies[flow]

    def snapshot(self) -> dict[Flow, Tally]:
        with self._lock:
            return {flow: Tally(t.num_leases, t.num_bytes, t.seconds) for flow, t in self._tallies.items()}
