"""What NVML says of a GPU, and what becomes of it where NVML says nothing. (tests/gpu asks a real one.)"""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from distserve.worker.gpu import Gpu, GpuSample


class NVMLError(Exception):
    pass


class Nvml(ModuleType):
    """The library's functions, of which some fail."""

    def __init__(self) -> None:
        super().__init__("a_nvml")
        self.failing: set[str] = set()
        self.asked: list[tuple[str, Any]] = []

    def _ask(self, name: str, argument: Any = None) -> None:
        self.asked.append((name, argument))
        if name in self.failing:
            raise NVMLError(f"{name} is not there")

    def nvmlInit(self) -> None:
        self._ask("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._ask("handle", uuid)
        return f"handle of {uuid}"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._ask("utilization", handle)
        return SimpleNamespace(gpu=37, memory=5)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._ask("memory", handle)
        return SimpleNamespace(used=1 << 30, total=1 << 40)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize(
    ("uuid", "asked_for"), [("ab-cd", "GPU-ab-cd"), ("GPU-ab-cd", "GPU-ab-cd"), ("MIG-ab-cd", "MIG-ab-cd")]
)
def test_a_device_is_found_by_its_uuid_once(nvml: Nvml, uuid: str, asked_for: str) -> None:
    gpu = Gpu("cuda:0", uuid, nvml.__name__)
    assert gpu.sample() == gpu.sample() == GpuSample("cuda:0", 0.37, 1 << 30)
    assert [argument for name, argument in nvml.asked if name == "handle"] == [asked_for]


def test_a_device_that_does_not_say_how_busy_it_is_still_has_memory(nvml: Nvml) -> None:
    nvml.failing = {"utilization"}
    assert Gpu("cuda:1", "ab", nvml.__name__).sample() == GpuSample("cuda:1", None, 1 << 30)


@pytest.mark.parametrize("failing", ["init", "handle"])
def test_without_driver_or_device_there_are_no_figures_and_one_line(
    nvml: Nvml, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gpu = Gpu("cuda:0", "ab", nvml.__name__)
    nvml.failing = {failing}
    assert gpu.sample() is gpu.sample() is None
    assert caplog.messages == [f"no figures of cuda:0: {failing} is not there"]
    nvml.failing = set()
    assert gpu.sample() is not None


def test_without_the_library_there_are_no_figures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert Gpu("cuda:0", "ab", "no_such_nvml").sample() is None
    assert "no_such_nvml" in caplog.messages[0]


def test_the_real_library_knows_no_such_device() -> None:
    pytest.importorskip("pynvml")
    assert Gpu("cuda:0", "00000000-0000-0000-0000-000000000000").sample() is None


def test_a_lost_device_is_looked_for_again(nvml: Nvml) -> None:
    gpu = Gpu("cuda:0", "ab", nvml.__name__)
    gpu.sample()
    nvml.failing = {"utilization", "memory"}
    assert gpu.sample() is None
    nvml.failing = set()
    assert gpu.sample() == GpuSample("cuda:0", 0.37, 1 << 30)
    assert [name for name, _ in nvml.asked].count("handle") == 2
