"""DistServe with the null engine, as processes: nats-server, workers, gateways."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from distserve.bus.embedded import EmbeddedNats

MODEL_NAME = "m"
READY_S = 90.0


@dataclass(slots=True)
class Side:
    """What is measured: where it listens (one port a gateway) and whose CPU is its own."""

    name: str
    ports: list[int] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)


class NullCluster:
    """`with NullCluster(model_folder, folder) as cluster:`, then `cluster.side`; logs go to `folder`.

    `settings`: `section.key` for all; `pass_ms`: how long a pass of the engine lasts."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        num_gateways: int = 1,
        engine_thread: bool = False,
        pass_ms: float = 0.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._options = ["--pass-ms", str(pass_ms)] + (["--engine-thread"] if engine_thread else [])
        self._first = ["prefill"] * num_prefill + ["decode"] * num_decode + ["gateway"] * num_gateways
        self._roles: list[str] = []  # of what has been started
        self.side = Side("DistServe")
        self._settings = {
            "model.path": str(model),
            "model.name": MODEL_NAME,
            "kv.num_blocks": 16_384,
            "decode.max_num_seqs": 1_024,
            "prefill.max_batch_tokens": 16_384,
            "prefill.max_waiting": 4_096,
            "decode.max_waiting": 4_096,
            "gateway.max_concurrent": 4_096,
            "telemetry.log_level": "warning",
            **(settings or {}),
        }
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            nats = stack.enter_context(EmbeddedNats())
            assert nats.pid is not None
            self.side.pids["nats"] = nats.pid
            self._nats_url = nats.url
            self._processes = stack.enter_context(Processes(self._folder))
            self._start(self._first)
            self._stack = stack.pop_all()
        return self

    def grow(self, num_workers: int) -> None:
        """To num_workers of each role, where there are fewer; returns when every gateway knows them."""
        missing = {role: num_workers - self._roles.count(role) for role in ("prefill", "decode")}
        self._start([role for role, num in missing.items() for _ in range(num)])

    def _start(self, roles: list[str]) -> None:
        for role in roles:
            name = f"{role}-{self._roles.count(role)}"
            self._roles.append(role)
            settings = {**self._settings, "bus.url": self._nats_url, f"{role}.id": name}
            if role == "gateway":
                self.side.ports.append(free_port())
                settings["gateway.port"] = self.side.ports[-1]
            self.side.pids[name] = self._processes.start(name, self._command(role), _environment(settings))
        for port in self.side.ports:
            self._processes.wait_for(f"http://127.0.0.1:{port}/health", self._all_there)

    def _command(self, role: str) -> list[str]:
        end = [role, "--die-with", str(os.getpid())]
        if role == "gateway":
            return [sys.executable, "-m", "distserve.cli", *end]
        return [sys.executable, "-m", "benchmarks.null_engine", *end, *self._options]

    def _all_there(self, body: bytes) -> bool:
        workers = json.loads(body).get("workers", {})
        return all(
            sum(workers.get(role, {}).get(status, 0) for status in ("ok", "degraded")) == self._roles.count(role)
            for role in ("prefill", "decode")
        )

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()


def _environment(settings: Mapping[str, Any]) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_")}
    env |= {f"DISTSERVE_{key.replace('.', '_')}".upper(): str(value) for key, value in settings.items()}
    return env | {"OMP_NUM_THREADS": "1"}


class Processes:
    """Started here, ended with it; what they print goes to a file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def start(self, name: str, command: list[str], env: Mapping[str, str]) -> int:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, env=dict(env), stdout=log, stderr=subprocess.STDOUT)
        self._running[name] = process
        return process.pid

    def wait_for(self, url: str, ready: Any) -> None:
        """Until ready(body) of a GET is true. Raises RuntimeError with the log of a process that has ended."""
        deadline = time.monotonic() + READY_S
        while True:
            for name, process in self._running.items():
                if process.poll() is not None:
                    log = (self._folder / f"{name}.log").read_text(errors="replace")
                    raise RuntimeError(f"{name} ended with status {process.returncode}:\n{log[-3000:]}")
            try:
                with urllib.request.urlopen(url, timeout=2) as response:
                    if ready(response.read()):
                        return
            except OSError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready within {READY_S:g} s: {url}; logs are in {self._folder}")
            time.sleep(0.1)

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
