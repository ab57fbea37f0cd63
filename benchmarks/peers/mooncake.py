"""Mooncake Store, beside which our store is measured.

    python -m benchmarks.peers.mooncake install VENV     # a venv of its own: the wheel without CUDA, and numpy

Its master keeps the names; values lie in a segment of another process and are put and got from registered buffers,
without a copy of their own, many in a call. Two ways to the segment, each measured:

    tcp     the client's transfer engine and the segment's, over loopback
    shm     Mooncake's `mooncake_client` holds the segment and copies to and from shared memory of the client, which is
            then a "dummy client"
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
from benchmarks.store_lines import Driver
from benchmarks.store_sides import Side, load_options, wait_listening
from benchmarks.store_values import MIB, Load

PACKAGE = "mooncake-transfer-engine-non-cuda"
VERSION = "0.3.13.post1"
NEEDS = ("numpy", "aiohttp", "msgpack", "requests")
INSTALL_S = 900.0
LISTEN_S = 30.0


def install(folder: Path) -> Path:
    """Make the venv, unless it is there and whole; returns its python. Raises CalledProcessError, RuntimeError."""
    python = folder / "bin" / "python"
    if python.exists() and _usable(python):
        return python
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for packages in (["--no-deps", f"{PACKAGE}=={VERSION}"], NEEDS):
        subprocess.run([*pip, *packages], check=True, timeout=INSTALL_S)
    if not _usable(python):
        raise RuntimeError(f"{folder}: Mooncake cannot be imported; try `{python} -c 'import mooncake.store'`")
    return python


def _usable(python: Path) -> bool:
    command = [str(python), "-c", "import mooncake.store, numpy"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


@contextmanager
def side(python: Path, way: str, load: Load, folder: Path) -> Iterator[Side]:
    """way: tcp or shm. Raises DriverError if the driver does not come up, TimeoutError if a server does not."""
    [programs] = python.parent.parent.glob("lib/python*/site-packages/mooncake")
    log = folder / f"mooncake-{way}"
    log.mkdir(parents=True, exist_ok=True)
    master_port, segment_port = free_port(), free_port()
    master = f"127.0.0.1:{master_port}"
    segment_mib = str(2 * load.total_bytes // MIB)
    driver = [str(python), "-m", "benchmarks.peers.mooncake_driver"]
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(log))
        command = [
            str(programs / "mooncake_master"),
            f"--rpc_port={master_port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={free_port()}",
            "--metrics_host=127.0.0.1",
        ]
        pids = [processes.start("master", command, os.environ)]
        wait_listening(master_port, "mooncake_master", LISTEN_S)
        if way == "shm":
            command = [
                str(programs / "mooncake_client"),
                "--host=127.0.0.1",
                f"--port={segment_port}",
                "--metadata_server=P2PHANDSHAKE",
                f"--master_server_address={master}",
                f"--global_segment_size={segment_mib} MB",
                "--protocol=tcp",
            ]
            pids.append(processes.start("segment", command, os.environ))
            wait_listening(segment_port, "mooncake_client", LISTEN_S)
        else:
            options = ["segment", "--master", master, "--port", str(segment_port), "--mib", segment_mib]
            segment = stack.enter_context(Driver([*driver, *options], log / "segment.log"))
            segment.wait_ready()
            pids.append(segment.pid)
        port = segment_port if way == "shm" else free_port()
        options = [way, "--master", master, "--port", str(port), *load_options(load)]
        near = stack.enter_context(Driver([*driver, *options], log / "driver.log"))
        near.wait_ready()
        yield Side(f"Mooncake, {way}", near, pids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["install"])
    parser.add_argument("venv", type=Path)
    print(install(parser.parse_args().venv), file=sys.stdout)


if __name__ == "__main__":
    main()
