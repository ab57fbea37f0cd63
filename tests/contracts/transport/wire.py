"""Faults between an rdma sender and its devices, real or not: work requests are held back, queue pairs broken. As
proxy.Proxy does for sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from distserve.messages import RailOffer, RemoteRegion
from distserve.transport.rdma.device import Nic, Pair, PairOptions, Write
from distserve.transport.rdma.halves import OpenNics


class Wire:
    """Stands between a sender and all of its devices."""

    def __init__(self) -> None:
        self.forwarded = 0  # bytes of messages and writes posted
        self.cut_after: int | None = None  # break every pair once so many bytes were posted
        self.lock = threading.RLock()
        self.pairs: list[_HeldPair] = []
        self._held: list[Callable[[], None]] | None = None

    def through(self, open_nics: OpenNics) -> OpenNics:
        def opened(options: Any) -> list[tuple[Nic, RailOffer]]:
            return [(_WiredNic(nic, self), offer) for nic, offer in open_nics(options)]  # type: ignore[misc]

        return opened

    def redirect(self, region: RemoteRegion) -> RemoteRegion:
        """As of a proxy; here everything goes by the wire anyway."""
        return region

    def hold(self) -> None:
        """What the sender posts from now on stays here until release()."""
        with self.lock:
            self._held = self._held if self._held is not None else []

    @property
    def num_held(self) -> int:
        """Doorbells that wait for release()."""
        return len(self._held or ())

    def release(self) -> None:
        with self.lock:
            held, self._held = self._held or [], None
            for post in held:
                try:
                    post()
                except OSError:
                    pass  # its pair is closed

    def cut(self) -> None:
        """Every pair of the sender is in error."""
        with self.lock:
            for pair in self.pairs:
                pair.fail()

    def close(self) -> None:
        self.release()

    def post(self, num_bytes: int, post: Callable[[], None]) -> None:
        with self.lock:
            self.forwarded += num_bytes
            if self.cut_after is not None and self.forwarded >= self.cut_after:
                self.cut_after = None
                self.cut()
            if self._held is not None:
                self._held.append(post)
            else:
                post()


class _WiredNic:
    def __init__(self, nic: Nic, wire: Wire) -> None:
        self._nic = nic
        self._wire = wire

    def pair(self, options: PairOptions) -> Pair:
        pair = _HeldPair(self._nic.pair(options), self._wire)
        with self._wire.lock:
            self._wire.pairs.append(pair)
        return pair

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nic, name)


class _HeldPair:
    def __init__(self, pair: Pair, wire: Wire) -> None:
        self._pair = pair
        self._wire = wire

    def post_writes(self, writes: Sequence[Write], lkey: int) -> None:
        self._wire.post(sum(w.length for w in writes), lambda: self._pair.post_writes(writes, lkey))

    def post_send(self, wr_id: int, address: int, length: int, lkey: int, *, signaled: bool = True) -> None:
        self._wire.post(length, lambda: self._pair.post_send(wr_id, address, length, lkey, signaled=signaled))

    def close(self) -> None:
        with self._wire.lock:
            if self in self._wire.pairs:
                self._wire.pairs.remove(self)
            self._pair.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)
