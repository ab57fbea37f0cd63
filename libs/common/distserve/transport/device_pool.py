"""What transports need of a KV pool in a device's memory. cuda_pool.py has it for GPUs."""

from __future__ import annotations

from typing import Protocol

from distserve.transport.rdma.dmabuf import Export, Facts
from distserve.transport.staging_ring import Copier


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

    def copier(self) -> Copier:
        """A new one, for one sender or receiver. Raises ConfigError."""
