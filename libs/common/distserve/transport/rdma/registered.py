"""Memory that a device may read and write, and windows on it that let a peer write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distserve.transport.rdma.pyverbs_api import Closed, tried

if TYPE_CHECKING:
    from distserve.transport.rdma.queue_pair import Pair
    from distserve.transport.rdma.verbs import Nic


class Region:
    """device.Region. Of its memory only the address is kept: whoever registers it keeps it alive."""

    def __init__(self, nic: Nic, mr: Any) -> None:
        self.lkey: int = mr.lkey
        self.rkey: int = mr.rkey
        self.mr: Any = mr
        self._nic = nic

    def close(self) -> None:
        """Idempotent. Raises OSError (EBUSY or EINVAL while windows are bound to it, on some devices)."""
        if self in self._nic.regions:
            with tried(f"deregister a region of {self._nic.name}"):
                self.mr.close()
            self.mr = Closed("the region")
            self._nic.regions.discard(self)


class Window:
    """device.Window."""

    def __init__(self, nic: Nic, mw: Any) -> None:
        self.rkey: int = mw.rkey
        self.mw: Any = mw
        self.pair: Pair | None = None  # that it was bound on
        self._nic = nic

    def close(self) -> None:
        if self in self._nic.windows:
            with tried(f"free a memory window of {self._nic.name}"):
                self.mw.close()
            self.mw = Closed("the memory window")
            self._nic.windows.discard(self)
            if self.pair is not None:
                self.pair.windows.discard(self)
