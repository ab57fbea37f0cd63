"""One process's GPU memory in another's address space: CUDA's inter-process handles, through the driver.

The owner asks the driver for a handle of the allocation that its memory lies in (cuIpcGetMemHandle), any process of the
same user on the host opens it (cuIpcOpenMemHandle). An opened handle keeps the memory there, also when its owner has
died; what the owner freed and used again is seen as it is, so its blocks must be kept by other means (cuda_ipc.py).
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable

import msgspec

from distserve.errors import TransportError, TransportUnavailable
from distserve.transport.rdma.dmabuf import CudaDriver

# Of this process: a number would not do, since processes of two containers may have the same one.
_PROCESS = secrets.token_bytes(16)
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class IpcMemory(msgspec.Struct, frozen=True, array_like=True):
    """num_bytes at `address` of a process, `offset` bytes into the allocation that `handle` stands for."""

    process: bytes
    address: int
    handle: bytes
    offset: int
    num_bytes: int
    device: str  # PCI address of the GPU that has it

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)


class IpcDriver(CudaDriver):
    """Raises TransportUnavailable where there is no CUDA driver, or it refuses."""

    def share(self, address: int, num_bytes: int) -> IpcMemory:
        """address, num_bytes: device memory of one allocation. TransportUnavailable for memory that has no handle:
        torch's expandable segments have none."""
        device = self.device_of(address)
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self._context(device):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        offset = address - base.value
        if offset + num_bytes > size.value:
            raise TransportUnavailable(
                f"{num_bytes} bytes of GPU memory lie in several allocations, which one handle can't stand for: leave "
                "expandable_segments out of PYTORCH_CUDA_ALLOC_CONF",
                num_bytes=num_bytes,
                allocated=size.value,
            )
        return IpcMemory(_PROCESS, address, bytes(handle.reserved), offset, num_bytes, self.pci_address(device))

    def open(self, memory: IpcMemory, device: int) -> tuple[int, Callable[[], None]]:
        """Its address here, for `device`, and what closes it, once, when nothing reads it any more. Refuses a range
        that the allocation does not have."""
        if memory.process == _PROCESS:  # the driver refuses a handle of one's own
            return memory.address, lambda: None
        handle = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(memory.handle))
        base = ctypes.c_uint64()
        with self._context(device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))

        def close() -> None:
            with self._context(device):
                self._call("cuIpcCloseMemHandle", base)

        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._context(device):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), base)
        if not 0 <= memory.offset <= size.value - memory.num_bytes:
            close()
            raise TransportUnavailable(
                f"a sender's pool of {memory.num_bytes} bytes at {memory.offset} is not within its allocation of "
                f"{size.value} bytes",
                value=memory.num_bytes,
                expected=f"within {size.value}",
            )
        return base.value + memory.offset, close


def decoded(raw: bytes) -> IpcMemory:
    """Raises TransportError for what is no IpcMemory."""
    try:
        memory = msgspec.msgpack.decode(raw, type=IpcMemory)
    except msgspec.MsgspecError as e:
        raise TransportError(f"a sender by cuda_ipc says nothing that its GPU memory could be found by: {e}") from e
    if len(memory.handle) != HANDLE_BYTES:
        raise TransportError(
            f"a handle of GPU memory has {len(memory.handle)} bytes, must have {HANDLE_BYTES}", size=len(memory.handle)
        )
    return memory
