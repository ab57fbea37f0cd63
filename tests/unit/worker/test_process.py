"""A process that keeps itself to its part of the host, as the command line does it before torch is imported."""

import os
import subprocess
import sys

import pytest

from distserve.config import load_config
from distserve.errors import ConfigError
from distserve.worker import process

CLEAN = ("OMP_", "KMP_", "MKL_", "GOMP_")


def entered(role: str, then: str, env: dict[str, str] | None = None, /, **settings: object) -> str:
    """What a process prints that entered and ran `then`; with standard error."""
    settings = {key.replace("__", "."): value for key, value in settings.items()}
    code = (
        "import os; from distserve.config import load_config; from distserve.worker import process;"
        f"process.enter({role!r}, load_config(overrides={settings!r})); {then}"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(CLEAN)} | (env or {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=clean)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() + done.stderr


def test_a_worker_stays_on_its_cores_with_as_many_threads() -> None:
    core, show = max(os.sched_getaffinity(0)), "print(sorted(process.affinity()), os.environ['OMP_NUM_THREADS'])"
    assert entered("decode", show, decode__cpus=str(core)) == f"[{core}] 1"
    assert entered("prefill", show, prefill__num_threads=3) == f"{sorted(os.sched_getaffinity(0))} 3"


def test_openmp_does_not_spin_unless_the_environment_wants_it() -> None:
    show = "import torch"
    said = entered("prefill", show, {"OMP_DISPLAY_ENV": "verbose"}, prefill__num_threads=2)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in said
    assert "GOMP_SPINCOUNT = '0'" in said
    assert "OMP_NUM_THREADS = '2'" in said
    own = entered("prefill", "print(os.environ['OMP_WAIT_POLICY'])", {"OMP_WAIT_POLICY": "active"})
    assert own == "active"


def test_cores_that_are_not_there_are_refused() -> None:
    config = load_config(overrides={"decode.cpus": "1023"})
    with pytest.raises(ConfigError, match=r"decode\.cpus is '1023', must be among the usable cores"):
        process.enter("decode", config)
    with pytest.raises(ConfigError, match=r"gateway\.cpus is '1023'"):
        process.enter("gateway", load_config(overrides={"gateway.cpus": "1023"}))


def test_a_part_of_a_gpu_is_in_the_environment_before_cuda_starts() -> None:
    show = "print(os.environ.get('CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'))"
    gpu = {"model__device": "cuda", "decode__colocated": True}
    assert entered("decode", show, decode__mps_percentage=40, **gpu) == "40"
    assert entered("decode", show, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "70"}, **gpu) == "70"
