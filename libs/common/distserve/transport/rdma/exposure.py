"""What a receiver lets one link write for one lease, and how it takes that back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distserve.messages import TrafficClass
from distserve.transport.inbound import InboundLease
from distserve.transport.rdma.connect import CLASSES, rail_of
from distserve.transport.rdma.device import Nic, Region, Window
from distserve.transport.rdma.frames import Commit, Run
from distserve.transport.rdma.halves import Devices
from distserve.transport.rdma.lanes import Lane
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.reactor import Timer
from distserve.transport.rdma.room import Place
from distserve.transport.spans import Ids, runs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rail:
    """A matched device, as the receiver uses it."""

    nic: Nic
    pool: Region
    has_windows: bool


def stripes(block_ids: Ids, rail: int, num_rails: int, stripe_blocks: int) -> list[tuple[int, int]]:
    """(first, count): runs of the lease's blocks that one rail carries and that lie one after the other in the pool."""
    found: list[tuple[int, int]] = []
    for position, length in runs(block_ids):
        if num_rails == 1:
            found.append((position, length))
            continue
        start = position
        while start < position + length:
            stop = min(position + length, (start // stripe_blocks + 1) * stripe_blocks)
            if rail_of(start, stripe_blocks, num_rails) == rail:
                found.append((start, stop - start))
            start = stop
    return found


@dataclass(slots=True, eq=False)
class Exposure:
    """A lease's place, open to one link. With windows the peer gets a key for each run of each lane that may carry
    blocks, made for this lease and no other; without, the pool's key, and only a destroyed pair takes that back.

    `close(done)` takes it back: done is called once no write can be placed. For the reactor's thread.
    """

    lease: InboundLease
    ticket: int
    traffic_class: TrafficClass
    lanes: dict[int, Lane]  # those that may carry blocks
    place: Place | None = None  # where they are to be written; left when all is closed, unless somebody took it
    runs: dict[int, list[Run]] = field(default_factory=dict)
    windows: dict[int, list[Window]] = field(default_factory=dict)
    is_open: bool = False  # the peer has been told
    is_closing: bool = False
    is_closed: bool = False
    marked: set[int] = field(default_factory=set)  # lanes whose ticket has come
    commit: Commit | None = None
    stop_timer: Timer | None = None
    _num_pending: int = 0
    _on_closed: list[Callable[[], object]] = field(default_factory=list)

    def is_by_windows_only(self, rails: Sequence[Rail]) -> bool:
        """Whether all that the peer was given can be taken back by invalidating."""
        return all(rails[number // len(CLASSES)].has_windows for number, lane_runs in self.runs.items() if lane_runs)

    def on_closed(self, done: Callable[[], object]) -> None:
        """Calls it when nothing can be written any more, whoever sees to that."""
        if self.is_closed:
            done()
        else:
            self._on_closed.append(done)

    def open(self, rails: Sequence[Rail], stripe_blocks: int, address: int, done: Callable[[], object]) -> None:
        """There is a place: binds the windows. done is called when the peer may be told, unless close() was first.
        address: of block 0 of what is registered. Raises OSError."""
        assert self.place is not None
        ids, block_bytes = self.place.ids, self.lease.rows.block_bytes
        binds: dict[int, list[tuple[Window, int, int]]] = {}
        for number in self.lanes:
            rail = rails[number // len(CLASSES)]
            self.runs[number] = []
            for first, count in stripes(ids, number // len(CLASSES), len(rails), stripe_blocks):
                start = address + int(ids[first]) * block_bytes
                if rail.has_windows:
                    window = rail.nic.window()
                    self.windows.setdefault(number, []).append(window)
                    binds.setdefault(number, []).append((window, start, count * block_bytes))
                self.runs[number].append(Run(first, count, start, rail.pool.rkey))
        self._num_pending = len(binds)

        def bound(number: int) -> None:
            self.runs[number] = [
                Run(run.first, run.count, run.address, window.rkey)
                for run, window in zip(self.runs[number], self.windows[number], strict=True)
            ]
            self._num_pending -= 1
            if not self._num_pending and not self.is_closing:
                self.is_open = True
                done()

        if not binds:
            self.is_open = True
            done()
        for number, bind in binds.items():
            self.lanes[number].bind(bind, lambda number=number: bound(number))  # type: ignore[misc]

    def close(self, done: Callable[[], object] | None = None) -> None:
        if done is not None:
            self.on_closed(done)
        if self.is_closing:
            return
        self.is_closing = True
        if self.stop_timer is not None:
            self.stop_timer.cancel()
        # An invalidate queues behind a bind of the same lane that has not completed yet.
        pending = [(number, windows) for number, windows in self.windows.items() if windows]
        num_pending = len(pending)

        def invalidated() -> None:
            nonlocal num_pending
            num_pending -= 1
            if not num_pending and not self.is_closed:
                self._release()

        if not pending:
            self._release()
        for number, windows in pending:
            self.lanes[number].invalidate(windows, invalidated)

    def gone(self) -> None:
        """The pairs are destroyed."""
        if self.stop_timer is not None:
            self.stop_timer.cancel()
        self.is_closing = True
        if not self.is_closed:
            self._release()

    def _release(self) -> None:
        self.is_closed = True
        self.release_windows()
        calls, self._on_closed = self._on_closed, []
        for done in calls:
            done()
        if self.place is not None:
            self.place.leave()

    def release_windows(self) -> None:
        """They are invalidated, or their pairs in error."""
        for windows in self.windows.values():
            for window in windows:
                try:
                    window.close()
                except OSError as e:
                    log.warning("a memory window was not given back: %s", e)
        self.windows = {}


def rails_of(devices: Devices, matched: Sequence[int], options: RdmaOptions) -> list[Rail]:
    """The receiver's devices by rail of a link."""
    return [Rail(devices.nics[i], devices.pools[i], devices.use_windows(i, options)) for i in matched]
