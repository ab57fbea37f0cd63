"""A queue pair of a soft device.

It keeps to what a reliable connection promises and no more: work requests of one pair are carried out in order by a
thread of the fabric's own, completions of unsignaled ones are not told, what they read lies in the region whose local
key they name, a write needs the key of a region or of a window that is bound on that very pair and reaches no further,
a message or immediate waits for a posted receive, any error breaks both ends and flushes what is posted, and a peer
that is gone is an error on the next request.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distserve.transport.rdma.device import Completion, PairAddress, PairOptions, Region, Verb, Window, Write
from tests.contracts.transport.soft_keys import SoftRegion, SoftWindow

if TYPE_CHECKING:
    from tests.contracts.transport.soft_nic import SoftNic

ACCESS, RETRY, FLUSHED, LOCAL, BIND = 10, 12, 5, 4, 6
REASONS = {
    ACCESS: "remote access error",
    RETRY: "transport retry counter exceeded",
    FLUSHED: "flushed",
    LOCAL: "local protection error",
    BIND: "memory window bind error",
}


@dataclass(eq=False)
class SoftPair:
    nic: SoftNic
    options: PairOptions
    qp_num: int
    psn: int = 7
    peer: SoftPair | None = None
    mtu: int = 0
    is_alive: bool = True  # not closed
    is_broken: bool = False
    sends: deque[tuple[int, bool, Callable[[], int]]] = field(default_factory=deque)
    receives: deque[tuple[int, int, int, int]] = field(default_factory=deque)

    def connect(self, gid_index: int, peer: PairAddress, *, mtu: int) -> None:
        fabric = self.nic.fabric
        with fabric.lock:
            self.peer, self.mtu = fabric.pairs.get((peer.gid, peer.qp_num)), mtu
        fabric.wake()

    def post_receive(self, wr_id: int, address: int, length: int, lkey: int) -> None:
        with self.nic.fabric.lock:
            self._require_alive()
            if len(self.receives) >= self.options.depth:
                raise OSError(12, "the receive queue is full")
            self.receives.append((wr_id, address, length, lkey))
        self.nic.fabric.wake()

    def post_writes(self, writes: Sequence[Write], lkey: int) -> None:
        for write in writes:
            assert write.length or write.immediate is not None
        self._post([(w.wr_id, w.signaled, lambda w=w: self._write(w, lkey)) for w in writes])  # type: ignore[misc]

    def post_send(self, wr_id: int, address: int, length: int, lkey: int, *, signaled: bool = True) -> None:
        self._post([(wr_id, signaled, lambda: self._send(address, length, lkey))])

    def post_binds(self, binds: Sequence[tuple[int, Window, int, int]], region: Region) -> None:
        last = len(binds) - 1
        self._post(
            [
                (wr_id, i == last, lambda w=window, a=address, n=length: self._bind(w, region, a, n))  # type: ignore[misc]
                for i, (wr_id, window, address, length) in enumerate(binds)
            ]
        )

    def post_invalidates(self, windows: Sequence[tuple[int, Window]]) -> None:
        last = len(windows) - 1
        self._post(
            [
                (wr_id, i == last, lambda w=window: self._invalidate(w))  # type: ignore[misc]
                for i, (wr_id, window) in enumerate(windows)
            ]
        )

    def fail(self) -> None:
        with self.nic.fabric.lock:
            self.break_()

    def close(self) -> None:
        with self.nic.fabric.lock:
            if self.is_alive:
                self.is_alive = False
                self.sends.clear()
                self.receives.clear()
                self.nic.forget("pairs", self)
                del self.nic.fabric.pairs[self.nic.gid, self.qp_num]

    # -- by the fabric's thread, under its lock

    def break_(self) -> None:
        if self.is_broken or not self.is_alive:
            return
        self.is_broken = True
        for wr_id, _, _ in self.sends:
            self.nic.complete(Completion(self.qp_num, wr_id, FLUSHED, Verb.WRITE, reason=REASONS[FLUSHED]))
        for wr_id, *_ in self.receives:
            self.nic.complete(Completion(self.qp_num, wr_id, FLUSHED, Verb.RECEIVE, reason=REASONS[FLUSHED]))
        self.sends.clear()
        self.receives.clear()

    def step(self) -> bool:
        """Carries one work request out. False if there is none that can be."""
        if not self.sends or self.is_broken or not self.is_alive:
            return False
        wr_id, signaled, run = self.sends[0]
        status = run()
        if status < 0:
            return False  # the peer has no receive posted: later
        self.sends.popleft()
        if status:
            self.nic.complete(Completion(self.qp_num, wr_id, status, Verb.WRITE, reason=REASONS[status]))
            if status == ACCESS and self.peer is not None:
                self.peer.break_()
            self.break_()
        elif signaled:
            self.nic.complete(Completion(self.qp_num, wr_id, 0, Verb.WRITE))
        return True

    def _post(self, requests: list[tuple[int, bool, Callable[[], int]]]) -> None:
        with self.nic.fabric.lock:
            self._require_alive()
            if self.is_broken:
                for wr_id, _, _ in requests:
                    self.nic.complete(Completion(self.qp_num, wr_id, FLUSHED, Verb.WRITE, reason=REASONS[FLUSHED]))
                return
            if len(self.sends) + len(requests) > self.options.depth:
                raise OSError(12, "the send queue is full")
            self.sends.extend(requests)
        self.nic.fabric.wake()

    def _require_alive(self) -> None:
        if not self.is_alive:
            raise OSError(22, "the pair is closed")

    def _reachable(self) -> SoftPair | None:
        peer = self.peer
        return peer if peer is not None and peer.is_alive and not peer.is_broken and peer.peer is self else None

    def _write(self, write: Write, lkey: int) -> int:
        peer, source = self._reachable(), self.nic.local(lkey, write.address, write.length)
        if source is None:
            return LOCAL
        if peer is None:
            return RETRY
        if write.immediate is not None and not peer.receives:
            return -1
        if write.length:
            key = peer.nic.keys.get(write.rkey)
            if key is None or not key.allows(peer, write.remote_address, write.length):
                return ACCESS
            ctypes.memmove(key.pointer(write.remote_address), source, write.length)
            self.nic.fabric.bytes_by_class[self.options.traffic_class] += write.length
        if write.immediate is not None:
            wr_id, *_ = peer.receives.popleft()
            done = Completion(peer.qp_num, wr_id, 0, Verb.RECEIVE_IMMEDIATE, write.length, write.immediate)
            peer.nic.complete(done)
        return 0

    def _send(self, address: int, length: int, lkey: int) -> int:
        peer, source = self._reachable(), self.nic.local(lkey, address, length)
        if source is None:
            return LOCAL
        if peer is None:
            return RETRY
        if not peer.receives:
            return -1
        wr_id, address, room, lkey = peer.receives.popleft()
        buffer = peer.nic.local(lkey, address, length)
        assert length <= room
        assert buffer is not None
        ctypes.memmove(buffer, source, length)
        peer.nic.complete(Completion(peer.qp_num, wr_id, 0, Verb.RECEIVE, length))
        return 0

    def _bind(self, window: SoftWindow, region: SoftRegion, address: int, length: int) -> int:
        if not region.takes_windows or not region.has(address, length):
            return BIND
        window.region = region
        window.pair, window.address, window.length, window.is_valid = self, address, length, True
        return 0

    def _invalidate(self, window: SoftWindow) -> int:
        if window.pair is not self or not window.is_valid:
            return LOCAL
        window.is_valid = False
        return 0
