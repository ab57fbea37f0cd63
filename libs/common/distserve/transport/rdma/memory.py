"""A pool as a network card addresses it: in host memory, or in a GPU's by dma-buf."""

from __future__ import annotations

from typing import Protocol

from distserve.errors import TransportUnavailable
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory
from distserve.transport.rdma.device import Nic, Region
from distserve.transport.rdma.dmabuf import Export


class DmabufNic(Protocol):
    """A Nic that registers dma-bufs."""

    def register_dmabuf(self, fd: int, offset: int, length: int, *, remote_write: bool) -> Region:
        """Bytes offset .. offset + length of the dma-buf. Its addresses, in work requests and for peers, start at
        `offset`, as those of a pyverbs DmaBufMR do (ibv_reg_dmabuf_mr with iova = offset: the kernel wants both at the
        same place in a page). Raises OSError (EOPNOTSUPP: the card's driver can't)."""


class LocalMemory(Protocol):
    """What sender and receiver need of our side's memory. The same addresses hold for every Nic it is registered on,
    in our work requests, in windows and for peers."""

    length: int  # bytes, from address_of(0, 0)

    def address_of(self, block: int, layer: int) -> int: ...

    def register(self, nic: Nic, *, remote_write: bool) -> Region:
        """Raises OSError, TransportUnavailable (the Nic can't register such memory)."""


class _Pool:
    def __init__(self, base: int, num_blocks: int, layout: KVLayout) -> None:
        self._base = base
        self._block_bytes = block_bytes(layout)
        self._layer_bytes = layer_block_bytes(layout)
        self.length = num_blocks * self._block_bytes

    def address_of(self, block: int, layer: int) -> int:
        return self._base + block * self._block_bytes + layer * self._layer_bytes


class HostMemory(_Pool):
    """A pool in host memory, or a staging Landing's."""

    def __init__(self, memory: PoolMemory) -> None:
        super().__init__(int(memory.blocks.ctypes.data), memory.blocks.shape[0], memory.layout)
        self._memory = memory  # kept mapped

    def register(self, nic: Nic, *, remote_write: bool) -> Region:
        return nic.register(self._base, self.length, remote_write=remote_write)


class DmabufMemory(_Pool):
    """A pool in a GPU's memory, exported. The export is this object's to close, once every region is."""

    def __init__(self, export: Export, num_blocks: int, layout: KVLayout) -> None:
        """Raises TransportUnavailable if the export is not the whole pool."""
        super().__init__(export.offset, num_blocks, layout)
        if export.length != self.length:
            raise TransportUnavailable(
                f"the export has {export.length} bytes, {num_blocks} blocks of the pool have {self.length}",
                length=export.length,
                expected=self.length,
            )
        self._export = export

    def register(self, nic: Nic, *, remote_write: bool) -> Region:
        register = getattr(nic, "register_dmabuf", None)
        if register is None:
            raise TransportUnavailable(f"{nic.name} registers no dma-buf", device=nic.name)
        region: Region = register(self._export.fd, self._export.offset, self.length, remote_write=remote_write)
        return region

    def close(self) -> None:
        self._export.close()
