"""DistServe across the two hosts: NATS, gateway and a prefill worker on the first, a decode worker on the second."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from roce_lab.errors import LabError, LabTimeout
from roce_lab.host import SHARED, Host, Process
from roce_lab.lab import PROJECT, Lab

GATEWAY_PORT, NATS_PORT = 8000, 4222
PORTS = (GATEWAY_PORT, NATS_PORT)  # of host 1, to be forwarded
NATS_URL = f"nats://10.77.0.1:{NATS_PORT}"  # from both hosts
MODEL_NAME = "tiny"
READY_TIMEOUT_S = 600.0  # importing torch takes an emulated host minutes
_STOP_S = 60.0

# Patience for hosts that are ten to thirty times slower than their makers think.
SETTINGS: Mapping[str, str] = {
    "bus.beat_s": "3",
    "bus.ttl_s": "20",
    "bus.connect_timeout_s": "60",
    "bus.request_timeout_s": "20",
    "gateway.silence_s": "10",
    "gateway.submit_timeout_s": "60",
    "kv.lease_ttl_s": "60",
    "kv.num_blocks": "1024",
    "prefill.num_threads": "1",
    "decode.num_threads": "1",
    "transport.connect_timeout_s": "30",
    "transport.commit_timeout_s": "120",
}


def interpreter() -> Path:
    """The project's Python. Raises LabError if there is no virtual environment."""
    python = PROJECT / ".venv/bin/python"
    if not python.exists():
        raise LabError(f"there is no {python}: `make demo` or `make test` makes the virtual environment")
    return python


def start_nats(host: Host) -> Process:
    """A nats-server with JetStream on every address of this host; returns when it listens."""
    binary = interpreter().with_name("nats-server")
    command = [str(binary), "-a", "0.0.0.0", "-p", str(NATS_PORT), "-js", "-sd", "/run/lab-tmp/nats"]
    server = host.start(command, name="nats-server")
    server.wait_for("Server is ready", 60)
    return server


def tiny_model(folder: Path) -> Path:
    """A random model of a few hundred kilobytes in `folder`, made on this machine, where that is quick."""
    code = "import sys; from tests.tiny_models import make_tiny; make_tiny('llama', sys.argv[1])"
    done = subprocess.run(
        [interpreter(), "-c", code, folder], cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise LabError(f"the tiny model cannot be made:\n{done.stderr[-2000:]}")
    return folder


class Serving:
    """The four processes. Entering starts them and returns when the gateway can answer; start() only starts them."""

    def __init__(
        self,
        lab: Lab,
        *,
        model: Path | None = None,
        settings: Sequence[str] = (),
        nats: Process | None = None,
    ) -> None:
        """model: a model folder that the hosts see, else a tiny random one is made. settings: `section.key=value`, on
        top of SETTINGS. nats: a server that start_nats() started on host 1, else one is."""
        self._lab = lab
        self._model = model
        self._settings = [s.partition("=")[::2] for s in settings]
        self._nats = nats
        self._stack = ExitStack()
        self.url = f"http://{lab.forwarded(GATEWAY_PORT)}"
        self._nice: list[str] = []
        self.processes: dict[str, Process] = {}

    @property
    def model_folder(self) -> Path:
        """As seen from this machine."""
        return self._model or self._lab.folder / "model"

    def start(self, *, politely: bool = False) -> None:
        """politely: until wait_ready() they load with what processor time others leave."""
        self._nice = ["nice", "-n", "15"] if politely else []
        with ExitStack() as stack:
            model = self._model_in_guest()
            if self._nats is None:
                stack.callback(start_nats(self._lab.host1).kill)
            stack.callback(self._stop)
            for role in ("decode", "prefill", "gateway"):
                self._start(role, model)
            self._stack = stack.pop_all()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Raises LabError if a process ends meanwhile, LabTimeout at the deadline; both with the ends of the logs."""
        deadline = time.monotonic() + timeout_s
        if self._nice:
            for role, process in self.processes.items():
                self._host_of(role).run(f"renice -n 0 -g {process.pid}", check=False)
        while not self._answers():
            for role, process in self.processes.items():
                if process.status is not None:
                    raise LabError(f"{role} ended with status {process.status}:\n{process.tail()}")
            if time.monotonic() > deadline:
                raise LabTimeout(f"DistServe is not ready after {timeout_s:g} s:\n{self.logs()}")
            time.sleep(0.25)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 120.0) -> dict[str, Any]:
        """The gateway's answer. Raises LabError with what it says if that is an error."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as e:
            raise LabError(f"POST {path}: {e.code} {e.read().decode(errors='replace')[:2000]}") from e

    def logs(self, num_chars: int = 2000) -> str:
        return "\n".join(f"----- {role}\n{process.tail(num_chars)}" for role, process in self.processes.items())

    def what_to_try(self, run: str) -> str:
        """For a person. run: the command that runs something on a host, less the host's number."""
        return _TRY.format(url=self.url, run=run, model=MODEL_NAME)

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def _model_in_guest(self) -> Path:
        if self._model is None:
            tiny_model(self._lab.folder / "model")
            return SHARED / "model"
        model = self._model.resolve()
        if model.is_relative_to(self._lab.folder):
            return SHARED / model.relative_to(self._lab.folder)
        return model

    def _host_of(self, role: str) -> Host:
        return self._lab.host2 if role == "decode" else self._lab.host1

    def _start(self, role: str, model: Path) -> None:
        host = self._host_of(role)
        settings: dict[str, str] = {
            **SETTINGS,
            f"{role}.id": f"{role}-0",
            "bus.url": NATS_URL,
            "gateway.host": "0.0.0.0",
            "gateway.port": str(GATEWAY_PORT),
            "model.name": MODEL_NAME,
            "model.path": str(model),
            "transport.host": host.address,
            "transport.kind": "rdma",
            **dict(self._settings),
        }
        env = {f"DISTSERVE_{key.replace('.', '_')}".upper(): value for key, value in settings.items()}
        command = [*self._nice, str(interpreter()), "-m", "distserve.cli", role]
        self.processes[role] = host.start(command, env=env, cwd=PROJECT, name=role)

    def _answers(self) -> bool:
        """With both workers: a gateway that has only decode is ready, and has it compute prompts itself."""
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as response:
                workers = json.load(response)["workers"]
        except OSError:
            return False
        return all({"ok", "degraded"} & workers[role].keys() for role in ("prefill", "decode"))

    def _stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(_STOP_S)
            except LabTimeout:
                process.kill()


_TRY = """
DistServe answers at {url}: gateway, NATS and prefill on host 1, decode on host 2, KV by RoCE v2 between them.

    curl -s {url}/v1/completions -H 'content-type: application/json' \\
        -d '{{"model": "{model}", "prompt": "In the beginning", "max_tokens": 16, "timings": true}}'

    watch the KV pass, with its class of traffic (tos 0xc0 is DSCP 48, 0x88 is 34, 0x0 is 0):
    {run} 1 'timeout 60 tcpdump -l -v -n -i eth0 udp port 4791'

    counters of the RDMA device:
    {run} 2 'grep . /sys/class/infiniband/rxe0/ports/1/hw_counters/*'
"""
