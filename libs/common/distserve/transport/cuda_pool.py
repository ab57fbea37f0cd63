"""A KV pool in a GPU's memory, as transports see it."""

from __future__ import annotations

import os
from typing import Any

from distserve.errors import ConfigError, TransportUnavailable
from distserve.kv.layout import block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory
from distserve.transport.ipc_memory import IpcDriver, decoded
from distserve.transport.rdma import dmabuf
from distserve.transport.rdma.dmabuf import CudaDriver, Export, Facts
from distserve.transport.staging import AttachedPool, CudaCopier

# Both names that torch has for one setting.
_ALLOC_CONFS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class CudaPool:
    """device_pool.DevicePool."""

    def __init__(self, pool: Any, layout: KVLayout) -> None:
        """pool: a contiguous torch.Tensor on a CUDA device, of any dtype, [num_blocks, *block_shape(layout)]; kept as
        long as this is. Raises ConfigError."""
        if pool.device.type != "cuda":
            raise ConfigError(
                f"the pool is on {pool.device}, must be on a CUDA device",
                key="pool",
                value=str(pool.device),
                expected="a CUDA device",
            )
        self.name = str(pool.device)
        self.num_blocks = int(pool.shape[0])
        self._pool = pool
        self._layout = layout

    def pci_address(self) -> str:
        try:
            driver = CudaDriver()
            return driver.pci_address(driver.device_of(self._pool.data_ptr()))
        except TransportUnavailable:
            return ""

    def facts(self) -> Facts:
        try:
            driver = CudaDriver()
            device = driver.device_of(self._pool.data_ptr())
            exported, ordered = driver.supported(device), driver.orders_writes(device)
        except TransportUnavailable:
            exported = ordered = False
        expandable = any(dmabuf.expandable_segments(os.environ.get(name, "")) for name in _ALLOC_CONFS)
        return Facts("cuda", dmabuf_exported=exported, writes_ordered=ordered, expandable_segments=expandable)

    def export(self) -> Export:
        return dmabuf.export(self._pool.data_ptr(), self.num_blocks * block_bytes(self._layout))

    def copier(self) -> CudaCopier:
        return CudaCopier(self._pool, self._layout)

    def share(self) -> bytes:
        return IpcDriver().share(self._pool.data_ptr(), self.num_blocks * block_bytes(self._layout)).encoded()

    def attach(self, shared: bytes, num_blocks: int) -> AttachedPool:
        return AttachedPool(decoded(shared), self._layout, num_blocks, self._pool.device)


def cuda_pool_memory(pool: Any, layout: KVLayout) -> PoolMemory:
    """As CudaPool."""
    return PoolMemory(layout=layout, blocks=None, on_device=CudaPool(pool, layout))
