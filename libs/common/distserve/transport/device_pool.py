"""What transports need of a KV pool in a device's memory. cuda_pool.py has it for GPUs."""

from __future__ import annotations

from typing import Protocol

from distserve.transport.rdma.dmabuf import Export, Facts
from distserve.transport.spans import Ids
from distserve.transport.staging_ring import Copier, Copy


class Attached(Protocol):
    """Another process's pool of the same layout, which this device reads."""

    num_blocks: int

    def close(self) -> None:
        """No copy out of it may be under way."""


class DeviceCopier(Copier, Protocol):
    """Copies between pools of devices too."""

    def await_mark(self, mark: object) -> None:
        """Blocks, without the GIL, until it is past. Raises TransportError if the device failed."""

    def take(self, source: Attached, sources: Ids, targets: Ids, layer_start: int, layer_stop: int) -> Copy:
        """Begin copying these layers of the source's block sources[i] to the pool's block targets[i]. The sums are of
        what then lies in the pool. Raises TransportError."""


class DevicePool(Protocol):
    """The host cannot touch its bytes. A network card can, where the pool can be exported to it as a dma-buf;
    otherwise they are copied to and from host memory."""

    @property
    def name(self) -> str:
        """The device's: "cuda:0"."""

    @property
    def num_blocks(self) -> int: ...

    def pci_address(self) -> str:
        """The device's, "0000:1b:00.0"; empty if not known. What is near to it is found by this."""

    def facts(self) -> Facts:
        """What is known about exporting it before any network card was asked. Raises nothing for what is not there."""

    def export(self) -> Export:
        """All of it as a dma-buf, the caller's to close. Raises TransportUnavailable."""

    def copier(self) -> DeviceCopier:
        """A new one, for one sender or receiver. Raises ConfigError."""

    def share(self) -> bytes:
        """What attach() of another process on this host finds it by. Raises TransportUnavailable."""

    def attach(self, shared: bytes, num_blocks: int) -> Attached:
        """The pool of num_blocks that another process has shared. Raises TransportUnavailable, TransportError."""
