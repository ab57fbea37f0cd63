"""A GPU's memory for a network card, without a copy: dma-buf export through the CUDA driver.

The driver hands out a file descriptor for a range of device memory (cuMemGetHandleForAddressRange), and the card's
driver registers it (ibv_reg_dmabuf_mr(3)). Only libcuda is needed, by ctypes: no torch, no nvidia-peermem.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from distserve.errors import ConfigError, TransportUnavailable

# Numbers of cuda.h.
DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
WRITES_ORDERING = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING ...
_ORDERED_FOR_OWNER = 100  # ... CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER; 200 for all devices, 0 for none
_RANGE_HANDLE_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_POINTER_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_LIBRARY = "libcuda.so.1"

Path = Literal["dmabuf", "staged", "host"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides how a card gets at a pool."""

    device_type: str  # of the pool's tensor: "cpu", "cuda"
    dmabuf_exported: bool = False  # the GPU's driver can export it: Driver.supported()
    dmabuf_registered: bool = False  # the card's driver can register it
    writes_ordered: bool = False  # CudaDriver.orders_writes()
    expandable_segments: bool = False  # PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True


@dataclass(frozen=True, slots=True)
class Plan:
    path: Path
    reason: str


def plan(facts: Facts) -> Plan:
    """How a card gets at the pool, and why. Raises ConfigError for a device that no path leads to."""
    if facts.device_type == "cpu":
        return Plan("host", "the pool is in host memory")
    if facts.device_type != "cuda":
        raise ConfigError(
            f"the pool is on a {facts.device_type!r} device, rdma reaches 'cpu' and 'cuda'",
            key="device",
            value=facts.device_type,
            expected="cpu or cuda",
        )
    if not facts.dmabuf_exported:
        return Plan("staged", "the GPU's driver exports no dma-buf (it needs the open kernel modules and Linux 5.12)")
    if not facts.dmabuf_registered:
        return Plan("staged", "the network card's driver registers no dma-buf")
    if not facts.writes_ordered:
        return Plan("staged", "this GPU's kernels may run ahead of what a network card has written before they started")
    if facts.expandable_segments:
        return Plan(
            "staged",
            "torch's expandable segments map the pool from several allocations, which not every driver exports as one: "
            "leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF",
        )
    return Plan("dmabuf", "the GPU's driver exports dma-bufs and the network card's registers them")


def expandable_segments(alloc_conf: str) -> bool:
    """Whether PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF) asks for them: "key:value,key:value"."""
    pairs = (entry.partition(":") for entry in alloc_conf.split(","))
    return any(key.strip() == "expandable_segments" and value.strip().lower() == "true" for key, _, value in pairs)


@dataclass(frozen=True, slots=True)
class Pages:
    """The whole pages that a range of bytes lies on."""

    start: int
    length: int
    offset: int  # of the range's first byte, from start


def whole_pages(address: int, length: int, page_bytes: int) -> Pages:
    """cuMemGetHandleForAddressRange takes whole host pages only. What else lies on them is in the dma-buf but not in
    the region, which starts at the offset and has the range's own length. Raises ConfigError."""
    if address <= 0 or length <= 0:
        raise ConfigError(
            f"a range of {length} bytes at {address:#x}, both must be above 0",
            key="length" if length <= 0 else "address",
            value=length if length <= 0 else address,
            expected="> 0",
        )
    start = address // page_bytes * page_bytes
    stop = -(-(address + length) // page_bytes) * page_bytes
    return Pages(start, stop - start, address - start)


class Driver(Protocol):
    """The three calls of the CUDA driver that are needed."""

    def device_of(self, address: int) -> int:
        """The ordinal of the device whose memory it is. Raises TransportUnavailable."""

    def supported(self, device: int) -> bool: ...

    def export_pages(self, device: int, start: int, length: int) -> int:
        """A dma-buf descriptor of whole pages. Raises TransportUnavailable."""


@dataclass(slots=True)
class Export:
    """A range of device memory as a dma-buf. The bytes are there as long as the allocation is: an export does not keep
    it. A region that was registered on it keeps the dma-buf, so the descriptor can then be closed."""

    fd: int
    offset: int  # of the range's first byte within the dma-buf
    length: int

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def export(address: int, length: int, driver: Driver | None = None, page_bytes: int | None = None) -> Export:
    """address, length: device memory of one allocation. Raises TransportUnavailable (no driver, no support, or the
    driver refuses the range), ConfigError (an empty range)."""
    pages = whole_pages(address, length, page_bytes or resource.getpagesize())
    driver = driver or CudaDriver()
    device = driver.device_of(address)
    if not driver.supported(device):
        raise TransportUnavailable(
            f"the driver of GPU {device} exports no dma-buf: it needs the open kernel modules and Linux 5.12",
            device=device,
        )
    return Export(driver.export_pages(device, pages.start, pages.length), pages.offset, length)


class CudaDriver:
    """libcuda by ctypes. Raises TransportUnavailable where there is none."""

    def __init__(self) -> None:
        try:
            self._cuda: Any = ctypes.CDLL(_LIBRARY)
        except OSError as e:
            raise TransportUnavailable(f"no CUDA driver: {e}", library=_LIBRARY) from e
        self._call("cuInit", ctypes.c_uint(0))

    def device_of(self, address: int) -> int:
        ordinal = ctypes.c_int()
        self._call(
            "cuPointerGetAttribute",
            ctypes.byref(ordinal),
            ctypes.c_int(_POINTER_DEVICE_ORDINAL),
            ctypes.c_uint64(address),
        )
        return ordinal.value

    def supported(self, device: int) -> bool:
        return bool(self.attribute(device, DMA_BUF_SUPPORTED))

    def orders_writes(self, device: int) -> bool:
        """Whether a kernel that is started once the host knows of a card's write sees it, without a flush
        (cuFlushGPUDirectRDMAWrites)."""
        return self.attribute(device, WRITES_ORDERING) >= _ORDERED_FOR_OWNER

    def attribute(self, device: int, number: int) -> int:
        """A CUdevice_attribute."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), self._handle(device))
        return value.value

    def pci_address(self, device: int) -> str:
        """ "0000:1b:00.0" """
        text = ctypes.create_string_buffer(64)
        self._call("cuDeviceGetPCIBusId", text, ctypes.c_int(len(text)), self._handle(device))
        return text.value.decode().lower()

    def export_pages(self, device: int, start: int, length: int) -> int:
        fd = ctypes.c_int(-1)
        with self._context(device):
            self._call(
                "cuMemGetHandleForAddressRange",
                ctypes.byref(fd),
                ctypes.c_uint64(start),
                ctypes.c_size_t(length),
                ctypes.c_int(_RANGE_HANDLE_DMA_BUF_FD),
                ctypes.c_ulonglong(0),
            )
        return fd.value

    def _handle(self, device: int) -> ctypes.c_int:
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        return handle

    @contextmanager
    def _context(self, device: int) -> Iterator[None]:
        """The device's primary context, which torch uses too, made current on this thread."""
        handle, context = self._handle(device), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", handle)

    def _call(self, name: str, *args: Any) -> None:
        try:
            function = getattr(self._cuda, name)
        except AttributeError:
            raise TransportUnavailable(f"the CUDA driver has no {name}: it is older than 11.7", call=name) from None
        if code := function(*args):
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise TransportUnavailable(f"{name} failed: {reason} ({code})", call=name, status=code, reason=reason)
