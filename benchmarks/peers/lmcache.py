"""LMCache, beside which our store is measured.

    python -m benchmarks.peers.lmcache install VENV      # a venv of its own, with the CPU build of torch

The wheel asks for CUDA packages and cloud clients that a machine without a GPU can't use; it is installed without
dependencies, and what its storage and its servers import is named here. Three ways, each measured:

    shm     `lmcache server`, which copies to and from the workers' KV in shared memory
    lm      `lmcache_server`, the plain one, over a socket
    local   LMCache's memory in the worker's own process: no other process has it
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.control_plane_sides import Processes, free_port
from benchmarks.peers.vllm import TORCH, TORCH_INDEX
from benchmarks.store_lines import Driver
from benchmarks.store_sides import Side, load_options, wait_listening
from benchmarks.store_values import BLOCK_SIZE, Load

VERSION = "0.5.6"
NEEDS = (
    "aiofile",
    "aiofiles",
    "aiohttp",
    "blake3",
    "cachetools",
    "cryptography",
    "fastapi",
    "google-api-core",
    "httptools",
    "httpx",
    "msgspec",
    "numba",
    "numpy",
    "nvtx",
    "opentelemetry-api",
    "opentelemetry-exporter-otlp",
    "opentelemetry-exporter-prometheus",
    "opentelemetry-sdk",
    "prometheus-client",
    "psutil",
    "py-cpuinfo",
    "pyyaml",
    "pyzmq",
    "redis",
    "requests",
    "safetensors",
    "sortedcontainers",
    "transformers",
    "uvicorn",
)
INSTALL_S = 1800.0
LISTEN_S = 90.0
QUIET = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}


def install(folder: Path) -> Path:
    """Make the venv, unless it is there and whole; returns its python. Raises CalledProcessError, RuntimeError."""
    python = folder / "bin" / "python"
    if python.exists() and _usable(python):
        return python
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _install_torch(pip)
    for packages in (NEEDS, ["--no-deps", f"lmcache=={VERSION}"]):
        subprocess.run([*pip, *packages], check=True, timeout=INSTALL_S)
    if not _usable(python):
        raise RuntimeError(f"{folder}: LMCache cannot be imported; try `{python} -c 'import lmcache'`")
    return python


def _install_torch(pip: list[str]) -> None:
    """The CPU build, from wherever pip is told to look; where there is none, from PyTorch's own index."""
    try:
        subprocess.run([*pip, f"torch=={TORCH}"], check=True, timeout=INSTALL_S)
    except subprocess.CalledProcessError:
        subprocess.run([*pip, f"torch=={TORCH}", "--extra-index-url", TORCH_INDEX], check=True, timeout=INSTALL_S)


def _usable(python: Path) -> bool:
    command = [str(python), "-c", "import lmcache.v1.storage_backend.storage_manager, cryptography, torch"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


@contextmanager
def side(python: Path, way: str, load: Load, folder: Path) -> Iterator[Side]:
    """way: shm, lm or local. Raises DriverError if the driver does not come up, TimeoutError if a server does not."""
    log = folder / f"lmcache-{way}"
    log.mkdir(parents=True, exist_ok=True)
    port, env = free_port(), os.environ | QUIET
    pids, options = [], [way, *load_options(load)]
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(log))
        if way == "shm":
            command = [str(python.parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--http-host", "127.0.0.1", "--http-port", str(free_port())]
            command += ["--prometheus-port", str(free_port()), "--chunk-size", str(BLOCK_SIZE)]
            command += ["--l1-size-gb", str(4 * load.total_bytes / (1 << 30)), "--eviction-policy", "LRU"]
            options += ["--url", f"tcp://127.0.0.1:{port}"]
        if way == "lm":
            command = [str(python.parent / "lmcache_server"), "127.0.0.1", str(port)]
            options += ["--url", f"lm://127.0.0.1:{port}"]
        if way != "local":
            pids = [processes.start("server", command, env)]
            wait_listening(port, command[0], LISTEN_S)
        near = Driver([str(python), "-m", "benchmarks.peers.lmcache_driver", *options], log / "driver.log", env=env)
        stack.enter_context(near)
        near.wait_ready()
        yield Side(f"LMCache, {way}", near, pids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["install"])
    parser.add_argument("venv", type=Path)
    print(install(parser.parse_args().venv), file=sys.stdout)


if __name__ == "__main__":
    main()
