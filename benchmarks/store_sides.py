"""What is compared: each a driver and the servers behind it, up together for one size of values."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.store_lines import Driver
from benchmarks.store_values import MIB, Load

STOP_S = 30.0
Verb = Literal["put", "get"]


@dataclass(slots=True)
class Side:
    name: str
    driver: Driver
    servers: list[int] = field(default_factory=list)  # process ids; with all below them

    def prepare(self, verb: Verb) -> None:
        """What comes before the time."""

    def measure(self, verb: Verb, turn: int) -> float:
        """Seconds. Raises DriverError."""
        return self.driver.ask(verb, turn)

    def clear(self, turn: int) -> None:
        self.driver.ask("clear", turn)


def load_options(load: Load) -> list[str]:
    return ["--size", load.size.label, "--mib", str(load.total_bytes // MIB)]


@contextmanager
def module_side(name: str, module: str, load: Load, folder: Path, *options: str) -> Iterator[Side]:
    """A driver of ours without servers of its own."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *load_options(load), *options]
    with Driver(command, folder / f"{module}.log") as driver:
        driver.wait_ready()
        yield Side(name, driver)


class Node:
    """`distserve kvstore` for one model, whose layout it learns from its client. `with` it, it runs."""

    def __init__(self, url: str, model: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._log = folder / f"{model}.log"
        self._model = model
        self._lives = 0
        env = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_") or k == "DISTSERVE_CACHE"}
        values = {"bus.url": url, "model.name": model, "model.path": model, "kvstore.folder": folder / model}
        self._env = env | _variables({**values, **settings})

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        self._lives += 1
        env = self._env | _variables({"kvstore.id": f"{self._model}-{self._lives}"})
        command = [sys.executable, "-m", "distserve.cli", "kvstore", "--die-with", str(os.getpid())]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)


def _variables(settings: Mapping[str, Any]) -> dict[str, str]:
    return {f"DISTSERVE_{key.replace('.', '_')}".upper(): str(value) for key, value in settings.items()}


class DiskSide(Side):
    """A node that is started anew before each get, so that its memory is empty."""

    node: Node

    def prepare(self, verb: Verb) -> None:
        if verb == "get":
            self.node.stop()
            self.node.start()
            self.servers = [self.node.pid]
            self.driver.ask("wait", 0)


@contextmanager
def store_side(url: str, kind: str, tier: Literal["dram", "disk"], load: Load, folder: Path) -> Iterator[Side]:
    """A node of ours and its client. The disk's files lie in `folder`."""
    model = f"{tier}-{kind}-{load.size.label}"
    settings = {
        "kvstore.dram_bytes": 2 * load.total_bytes,
        "kvstore.disk_bytes": max(4 * load.total_bytes, 512 * MIB) if tier == "disk" else 0,
        "kvstore.segment_bytes": max(64 * MIB, 4 * load.size.value_bytes),
    }
    node = Node(url, model, folder, settings)
    node.start()
    options = ["--url", url, "--model", model, "--kind", kind, "--from", tier]
    try:
        command = [sys.executable, "-m", "benchmarks.store_client", *load_options(load), *options]
        with Driver(command, folder / f"{model}-client.log") as driver:
            driver.wait_ready()
            if tier == "dram":
                yield Side(f"DistServe, {kind}", driver, [node.pid])
            else:
                side = DiskSide(f"DistServe, {kind}, disk", driver, [node.pid])
                side.node = node
                yield side
    finally:
        node.stop()


def wait_listening(port: int, name: str, timeout_s: float) -> None:
    """Until something listens at the port of this machine. Raises TimeoutError naming who does not."""
    deadline = time.monotonic() + timeout_s
    while True:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} does not listen at port {port} after {timeout_s:g} s")
        time.sleep(0.05)
