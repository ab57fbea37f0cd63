"""What NVML says of the device that CUDA gave this process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from distserve.engine.device import uuid_of
from distserve.worker.gpu import Gpu

pytest.importorskip("pynvml")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_device_that_computes_says_so_and_what_memory_is_taken() -> None:
    held = torch.ones(1 << 28, device="cuda")  # 1 GiB
    gpu = Gpu("cuda:0", uuid_of("cuda:0"))
    a = torch.randn(8192, 8192, device="cuda")
    for _ in range(400):
        for _ in range(20):
            a = (a @ a).clamp(-1, 1)
        torch.cuda.synchronize()
        sample = gpu.sample()
        assert sample is not None
        assert (sample.memory_used_bytes or 0) >= held.nbytes
        if sample.utilization is None or sample.utilization > 0.2:
            break
    else:
        pytest.fail("it computes, and NVML says that it does not")
    assert sample.device == "cuda:0"
    assert sample.utilization is None or sample.utilization <= 1


def test_a_device_is_the_same_one_whatever_number_it_has_here() -> None:
    last = torch.cuda.device_count() - 1
    code = textwrap.dedent("""
        import pynvml
        from distserve.engine.device import uuid_of
        from distserve.worker.gpu import Gpu
        uuid = uuid_of("cuda:0")
        assert Gpu("cuda:0", uuid).sample() is not None
        pynvml.nvmlInit()
        print(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)), uuid)
    """)
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": str(last), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout.split()
    assert told == [str(last), uuid_of(f"cuda:{last}")]
