"""How busy this worker's GPU is, by NVIDIA's management library (NVML).

NVML knows nothing of CUDA_VISIBLE_DEVICES: the device is found by its UUID, whatever number CUDA gives it here. Where
the library, the driver or the device is missing there is simply nothing to show.
"""

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuSample:
    """device: as CUDA numbers it here: "cuda:0". utilization: of the last fraction of a second, that in which a kernel
    ran, whoever's it was; None where the device doesn't say (a MIG instance). memory_used_bytes: by everybody."""

    device: str
    utilization: float | None
    memory_used_bytes: int | None


class Gpu:
    """Thread-safe. A sample takes up to milliseconds: not for an event loop."""

    def __init__(self, device: str, uuid: str, library: str = "pynvml") -> None:
        """device: a torch device's name; uuid: as CUDA gives it, with or without "GPU-". library: the module."""
        self._device = device
        self._uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._library = library
        self._lock = threading.Lock()
        self._opened: tuple[Any, Any] | None = None  # the module and the device's handle
        self._told = False

    def sample(self) -> GpuSample | None:
        """None if there is nothing to ask, which is logged once; asked again at the next call."""
        with self._lock:
            try:
                self._opened = opened = self._opened or self._open()
            except Exception as e:  # the library's errors are its own, made at its import
                if not self._told:
                    log.info("no figures of %s: %s", self._device, e)
                    self._told = True
                return None
            nvml, handle = opened
            utilization = _asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            used = _asked(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))
            if utilization is None and used is None:
                self._opened = None  # a driver that was loaded anew knows the handle no more
                return None
            return GpuSample(self._device, utilization, used)

    def _open(self) -> tuple[Any, Any]:
        nvml = importlib.import_module(self._library)
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByUUID(self._uuid)


def _asked(question: Callable[[], T]) -> T | None:
    try:
        return question()
    except Exception:  # not supported here, or the device is lost
        return None
