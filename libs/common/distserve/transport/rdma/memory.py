"""Memory as a network card addresses it: the host's, or a GPU's by dma-buf."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from distserve.errors import TransportUnavailable
from distserve.transport.rdma.device import Nic, Region
from distserve.transport.rdma.dmabuf import Export


class LocalMemory(Protocol):
    """What sender and receiver need of our side's memory. The same addresses hold for every Nic it is registered on,
    in our work requests, in windows and for peers."""

    address: int  # of its first byte
    length: int  # bytes
    takes_windows: bool  # memory windows can be bound on it

    def register(self, nic: Nic, *, remote_write: bool) -> Region:
        """Raises OSError (the Nic can't register such memory)."""

    def let_go(self) -> None:
        """No Nic is open any more."""


class HostMemory:
    """A pool in host memory, a StagingRing's slots or a Landing's blocks."""

    takes_windows = True

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.address = int(memory.ctypes.data)
        self.length = int(memory.nbytes)
        self._memory: npt.NDArray[np.uint8] | None = memory  # kept mapped

    def register(self, nic: Nic, *, remote_write: bool) -> Region:
        return nic.register(self.address, self.length, remote_write=remote_write)

    def let_go(self) -> None:
        self._memory = None


class DmabufMemory:
    """A pool in a GPU's memory, exported. Its addresses start at the offset in the dma-buf (Nic.register_dmabuf)."""

    takes_windows = False  # ibv_reg_dmabuf_mr(3): a dma-buf cannot be registered for binding

    def __init__(self, export: Export, length: int) -> None:
        """length: of the pool. The export stays the caller's, who may close it once every region is registered.
        Raises TransportUnavailable if it is not the whole pool."""
        if export.length != length:
            raise TransportUnavailable(
                f"the export has {export.length} bytes, the pool has {length}", length=export.length, expected=length
            )
        self.address, self.length = export.offset, length
        self._export = export

    def register(self, nic: Nic, *, remote_write: bool) -> Region:
        return nic.register_dmabuf(self._export.fd, self._export.offset, self.length, remote_write=remote_write)

    def let_go(self) -> None: ...
