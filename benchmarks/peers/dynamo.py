"""NVIDIA Dynamo's front end and mocker, beside which the control plane is measured.

    python -m benchmarks.peers.dynamo install VENV     # a venv of its own, without torch

Its package asks for a dependency that is not on PyPI, so that it is installed without dependencies, and what the
front end and the mocker import is named here.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from benchmarks.control_plane_sides import MODEL_NAME, Processes, Side, free_port

VERSION = "1.6.1"
NEEDS = (
    "aiohttp",
    "certifi",
    "kubernetes<33",
    "msgspec",
    "prometheus-client",
    "pydantic",
    "pyyaml",
    "pyzmq",
    "redis",
    "tqdm",
    "transformers",
    "uvloop",
    "zstandard",
)
INSTALL_S = 900.0


def install(folder: Path) -> Path:
    """Make the venv, unless it is there and whole; returns its python. Raises CalledProcessError."""
    python = folder / "bin" / "python"
    if python.exists() and _usable(python):
        return python
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for packages in ([f"ai-dynamo-runtime=={VERSION}", *NEEDS], ["--no-deps", f"ai-dynamo=={VERSION}"]):
        subprocess.run([*pip, *packages], check=True, timeout=INSTALL_S)
    if not _usable(python):
        raise RuntimeError(f"{folder}: dynamo.mocker does not start; try `{python} -m dynamo.mocker --help`")
    return python


def _usable(python: Path) -> bool:
    command = [str(python), "-m", "dynamo.mocker", "--help"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


class Dynamo:
    """`with Dynamo(venv, model_folder, folder) as side:`: front end, and a mocker each for prefill and decode, on one
    host over TCP, so fast that only their own work takes time."""

    def __init__(self, folder_of_venv: Path, model: Path, folder: Path) -> None:
        self._python = str(folder_of_venv / "bin" / "python")
        self._model = model
        self._folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> Side:
        side = Side("Dynamo", [free_port()])
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            found = stack.enter_context(tempfile.TemporaryDirectory())
            env = os.environ | {
                "DYN_DISCOVERY_BACKEND": "file",
                "DYN_FILE_KV": found,
                "DYN_TCP_RPC_HOST": "127.0.0.1",
                "DYN_REQUEST_PLANE": "tcp",
            }
            processes = stack.enter_context(Processes(self._folder))
            for role in ("prefill", "decode"):
                side.pids[role] = processes.start(f"mocker-{role}", self._mocker(role), env)
            front = ["--http-host", "127.0.0.1", "--http-port", str(side.ports[0]), "--router-mode", "round-robin"]
            side.pids["frontend"] = processes.start("frontend", [self._python, "-m", "dynamo.frontend", *front], env)
            url = f"http://127.0.0.1:{side.ports[0]}/v1/models"
            processes.wait_for(url, lambda body: f'"{MODEL_NAME}"'.encode() in body)
            self._stack = stack.pop_all()
        return side

    def _mocker(self, role: str) -> list[str]:
        options = {
            "--model-path": str(self._model),
            "--model-name": MODEL_NAME,
            "--speedup-ratio": "1000000",
            "--max-num-seqs": "1024",
            "--num-gpu-blocks-override": "65536",
            "--kv-transfer-bandwidth": "0",
            "--disaggregation-mode": role,
        }
        return [self._python, "-m", "dynamo.mocker", *(part for option in options.items() for part in option)]

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["install"])
    parser.add_argument("venv", type=Path)
    print(install(parser.parse_args().venv), file=sys.stdout)


if __name__ == "__main__":
    main()
