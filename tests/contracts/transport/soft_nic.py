"""RDMA devices that exist only in this process, for the protocol above them: on a machine without RDMA, and for faults
that a real device cannot be made to have.

They keep to what a reliable connection promises and no more: work requests of one pair are carried out in order by a
thread of the fabric's own, completions of unsignaled ones are not told, what they read lies in the region whose local
key they name, a write needs the key of a region or of a window that is bound on that very pair and reaches no further,
a message or immediate waits for a posted receive, any error breaks both ends and flushes what is posted, and a peer
that is gone is an error on the next request.

A dma-buf here is any file that can be mapped. As with ibv_reg_dmabuf_mr(3) and pyverbs, addresses in it start at the
offset that was registered, and no window can be bound on it. Memory that passes for a device's is refused.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from distserve.messages import RailOffer
from distserve.transport.rdma.device import Completion, Nic, PairAddress, PairOptions, Region, Verb, Window, Write

ACCESS, RETRY, FLUSHED, LOCAL, BIND = 10, 12, 5, 4, 6
REASONS = {
    ACCESS: "remote access error",
    RETRY: "transport retry counter exceeded",
    FLUSHED: "flushed",
    LOCAL: "local protection error",
    BIND: "memory window bind error",
}


@dataclass(eq=False)
class SoftRegion:
    nic: SoftNic
    address: int  # in work requests
    length: int
    remote_write: bool
    lkey: int
    rkey: int
    at: int  # where that is in this process
    takes_windows: bool = True
    keep: object = None

    def close(self) -> None:
        self.nic.forget("regions", self)
        self.nic.keys.pop(self.rkey, None)

    def has(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length

    def pointer(self, address: int) -> int:
        return self.at + address - self.address

    def allows(self, pair: SoftPair, address: int, length: int) -> bool:
        return self.remote_write and self.has(address, length)


@dataclass(eq=False)
class SoftWindow:
    nic: SoftNic
    rkey: int
    pair: SoftPair | None = None
    region: SoftRegion | None = None
    address: int = 0
    length: int = 0
    is_valid: bool = False
    keep: object = None

    def close(self) -> None:
        if self.is_valid and self.pair is not None and self.pair.is_alive and not self.pair.is_broken:
            raise OSError(16, "a window that is bound on a live pair was deallocated")
        self.nic.forget("windows", self)
        self.nic.keys.pop(self.rkey, None)

    def pointer(self, address: int) -> int:
        assert self.region is not None
        return self.region.pointer(address)

    def allows(self, pair: SoftPair, address: int, length: int) -> bool:
        inside = self.address <= address and address + length <= self.address + self.length
        return self.is_valid and pair is self.pair and inside


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


class SoftNic:
    """As device.Nic."""

    max_depth = 256

    def __init__(
        self, fabric: SoftFabric, index: int, has_windows: bool, mtu: int, registers_dmabufs: bool = True
    ) -> None:
        self.registers_dmabufs = registers_dmabufs
        self.fabric = fabric
        self.name = f"soft{index}:1"
        self.gid = f"0000:0000:0000:0000:0000:ffff:0a4d:{index:04x}"
        self.has_windows = has_windows
        self.mtu = mtu
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.keys: dict[int, SoftRegion | SoftWindow] = {}
        self._open: dict[str, set[object]] = {"pairs": set(), "regions": set(), "windows": set()}
        self._completions: deque[Completion] = deque()
        self._is_armed = False
        self._is_closed = False

    def register(self, address: int, length: int, *, remote_write: bool) -> SoftRegion:
        for start, stop in self.fabric.device_ranges:
            if address < stop and start < address + length:
                raise OSError(14, "that is a device's memory, not the host's")
        key = next(self.fabric.serial)
        return self._add(SoftRegion(self, address, length, remote_write, key, key, at=address))

    def register_dmabuf(self, fd: int, offset: int, length: int, *, remote_write: bool) -> SoftRegion:
        if not self.registers_dmabufs:
            raise OSError(95, "this device's driver registers no dma-buf")
        mapped = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        if offset + length > len(mapped):
            raise OSError(22, f"{length} bytes at {offset} of a dma-buf of {len(mapped)}")
        key, at = next(self.fabric.serial), int(mapped.ctypes.data) + offset
        return self._add(SoftRegion(self, offset, length, remote_write, key, key, at, takes_windows=False, keep=mapped))

    def _add(self, region: SoftRegion) -> SoftRegion:
        self._open["regions"].add(region)
        self.keys[region.rkey] = region
        return region

    def local(self, lkey: int, address: int, length: int) -> int | None:
        """Where that is in this process; None if the key does not open it."""
        region = self.keys.get(lkey)
        if not length:
            return 0
        return region.pointer(address) if isinstance(region, SoftRegion) and region.has(address, length) else None

    def window(self) -> SoftWindow:
        window = SoftWindow(self, next(self.fabric.serial))
        self._open["windows"].add(window)
        self.keys[window.rkey] = window
        return window

    def pair(self, options: PairOptions) -> SoftPair:
        pair = SoftPair(self, options, next(self.fabric.serial))
        with self.fabric.lock:
            self._open["pairs"].add(pair)
            self.fabric.pairs[self.gid, pair.qp_num] = pair
        return pair

    def poll(self, most: int = 64) -> list[Completion]:
        with self.fabric.lock:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                pass
            return [self._completions.popleft() for _ in range(min(most, len(self._completions)))]

    def arm(self) -> None:
        with self.fabric.lock:
            self._is_armed = True

    def counts(self) -> dict[str, int]:
        return {kind: len(objects) for kind, objects in self._open.items()}

    def close(self) -> None:
        with self.fabric.lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)
                for region in self.keys.values():
                    region.keep = None  # the map of a dma-buf

    def forget(self, kind: str, thing: object) -> None:
        self._open[kind].discard(thing)

    def complete(self, completion: Completion) -> None:
        self._completions.append(completion)
        if self._is_armed and not self._is_closed:
            self._is_armed = False
            os.eventfd_write(self.fd, 1)


class SoftFabric:
    """The network between soft devices. close() ends its thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.serial = itertools.count(0x100)
        self.pairs: dict[tuple[str, int], SoftPair] = {}
        self.bytes_by_class: Counter[int] = Counter()  # by traffic class octet
        self.nics: list[SoftNic] = []
        self.device_ranges: list[tuple[int, int]] = []  # addresses [start, stop) that no device may touch directly
        self._work = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="soft-fabric", daemon=True)
        self._thread.start()

    def opener(
        self,
        count: int = 1,
        *,
        has_windows: bool | Sequence[bool] = True,
        mtu: int = 4096,
        registers_dmabufs: bool | Sequence[bool] = True,
    ) -> Callable[[object], list[tuple[Nic, RailOffer]]]:
        """Gives a sender or receiver `count` devices of its own."""

        def open_nics(_: object) -> list[tuple[Nic, RailOffer]]:
            opened: list[tuple[Nic, RailOffer]] = []
            for i in range(count):
                windows = has_windows if isinstance(has_windows, bool) else has_windows[i]
                dmabufs = registers_dmabufs if isinstance(registers_dmabufs, bool) else registers_dmabufs[i]
                nic = SoftNic(self, len(self.nics) + 1, windows, mtu, dmabufs)
                self.nics.append(nic)
                opened.append((nic, RailOffer(index=i, gids=((0, nic.gid, 24),), mtu=mtu)))
            return opened

        return open_nics

    def wake(self) -> None:
        self._work.set()

    def is_idle(self) -> bool:
        """Whatever was posted on a live pair has been carried out."""
        with self.lock:
            return not any(p.sends for p in self.pairs.values() if not p.is_broken)

    def close(self) -> None:
        self._closed = True
        self.wake()
        self._thread.join(5)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closed:
            self._work.wait()
            self._work.clear()
            busy = True
            while busy and not self._closed:
                with self.lock:
                    busy = sum(pair.step() for pair in list(self.pairs.values())) > 0
