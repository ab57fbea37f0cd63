"""The network between RDMA devices that exist only in this process, for the protocol above them: on a machine without
RDMA, and for faults that a real device cannot be made to have. soft_pair says what they promise."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from distserve.messages import RailOffer
from distserve.transport.rdma.device import Nic
from tests.contracts.transport.soft_nic import SoftNic
from tests.contracts.transport.soft_pair import SoftPair


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
