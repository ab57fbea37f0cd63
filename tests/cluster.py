"""A real cluster for tests: nats-server and every service as its own OS process, started and stopped by hand.

Unlike `distserve up` it restarts nothing, so that a test decides who lives.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from distserve.bus.base import Watch
from distserve.bus.embedded import EmbeddedNats
from distserve.bus.nats import NatsBus
from distserve.messages import WorkerInfo

START_TIMEOUT_S = 90.0


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)


class Service:
    """One process of the cluster."""

    def __init__(self, role: str, worker_id: str, env: Mapping[str, str], log: Path) -> None:
        self.role = role
        self.id = worker_id
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "distserve.cli", role], env=dict(env), stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, as an operator would; returns the exit status."""
        self.process.terminate()
        return self.process.wait(timeout_s)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Cluster:
    """`with Cluster(model, tmp_path, prefill=[{}], decode=[{}]) as c:` — one dict of `section.key` settings for each
    worker and store node, on top of `settings` for all. Each store node has a folder of its own under `folder`."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        prefill: list[dict[str, Any]] | None = None,
        decode: list[dict[str, Any]] | None = None,
        kvstore: list[dict[str, Any]] | None = None,
        settings: dict[str, Any] | None = None,
        name: str = "tiny",
        gateway: bool = True,
    ) -> None:
        self.name = name
        self.folder = folder
        self._model = model
        self._prefill = [{}] if prefill is None else prefill
        self._decode = [{}] if decode is None else decode
        self._kvstore = kvstore or []
        self._settings = settings or {}
        self._with_gateway = gateway
        self._stack = ExitStack()
        self.services: list[Service] = []
        self.url = ""
        self.nats_url = ""
        self.monitor_url = ""

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            nats = stack.enter_context(EmbeddedNats(monitor=True))
            self.nats_url, self.monitor_url = nats.url, nats.monitor_url
            self._watching = stack.enter_context(Watching(nats.url, self._settings.get("bus.ttl_s", 2.5)))
            stack.callback(self._stop_all)
            for i, settings in enumerate(self._kvstore):
                self.start("kvstore", f"kvstore-{i}", settings)
            for i, settings in enumerate(self._prefill):
                self.start("prefill", f"prefill-{i}", settings)
            for i, settings in enumerate(self._decode):
                self.start("decode", f"decode-{i}", settings)
            if self._with_gateway:
                self.start_gateway()
            self.wait_for_workers({s.id for s in self.services if s.role != "gateway"})
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            for s in self.services:
                print(f"----- {s.id}\n{s.log.read_text(errors='replace')[-3000:]}")
        self._stack.close()

    def _stop_all(self) -> None:
        for s in self.services:
            if s.process.poll() is None:
                s.process.send_signal(signal.SIGCONT)
                s.process.terminate()
        for s in self.services:
            try:
                s.process.wait(15)
            except subprocess.TimeoutExpired:
                s.kill()

    # ------------------------------------------------------------ services

    def start(self, role: str, worker_id: str, settings: Mapping[str, Any] | None = None) -> Service:
        own = {f"{role}.id": worker_id, "prefill.num_threads": 1, "decode.num_threads": 1}
        defaults = {
            "bus.url": self.nats_url,
            "model.path": str(self._model),
            "model.name": self.name,
            "kv.num_blocks": 2048,
            "gateway.port": 0,
            "kvstore.folder": str(self.folder / worker_id),
            "kvstore.dram_bytes": 32 * 1024 * 1024,
            "kvstore.disk_bytes": 64 * 1024 * 1024,
            "kvstore.segment_bytes": 4 * 1024 * 1024,
        }
        env = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_") or k == "DISTSERVE_CACHE"}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        for key, value in {**defaults, **self._settings, **own, **(settings or {})}.items():
            env[f"DISTSERVE_{key.replace('.', '_')}".upper()] = str(value)
        service = Service(role, worker_id, env, self.folder / f"{worker_id}-{len(self.services)}.log")
        self.services.append(service)
        return service

    def start_gateway(self, worker_id: str = "gateway-0", settings: Mapping[str, Any] | None = None) -> Service:
        with_port = {"gateway.port": free_port(), **(settings or {})}
        service = self.start("gateway", worker_id, with_port)
        self.url = f"http://127.0.0.1:{with_port['gateway.port']}"
        wait_until(
            lambda: service.process.poll() is not None or self._answers("/health/live"),
            START_TIMEOUT_S,
            "gateway is up",
        )
        if service.process.poll() is not None:
            raise RuntimeError(f"the gateway ended: {service.log.read_text()[-3000:]}")
        return service

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self.url + path, timeout=2) as r:
                return bool(r.status == 200)
        except OSError:
            return False

    def __getitem__(self, worker_id: str) -> Service:
        return [s for s in self.services if s.id == worker_id][-1]

    # ------------------------------------------------------------ looking in

    def registry(self) -> dict[str, WorkerInfo]:
        """Who is registered now, as a live watch sees it."""
        return dict(self._watching.snapshot())

    def wait_for_workers(self, ids: set[str], timeout_s: float = START_TIMEOUT_S) -> None:
        """Until all of these are ready, and the gateway knows it."""

        def ready() -> bool:
            latest = {s.id: s for s in self.services if s.id in ids}  # an id may have had lives before
            for s in latest.values():
                if s.process.poll() is not None:
                    raise RuntimeError(f"{s.id} ended: {s.log.read_text()[-3000:]}")
            found = self.registry()
            return all(i in found and found[i].status in ("ok", "degraded") for i in ids)

        wait_until(ready, timeout_s, f"{ids} are ready")
        if self.url and ids:
            wait_until(lambda: self._answers("/health/ready"), 10, "the gateway is ready")

    def wait_until_idle(self, timeout_s: float = 10.0) -> None:
        """Until every live worker reports that all its blocks are free and nothing runs."""

        def idle() -> bool:
            return all(
                w.load.free_blocks == w.load.total_blocks and not w.load.num_running and not w.load.num_waiting
                for w in self.registry().values()
                if w.role in ("prefill", "decode")
            )

        wait_until(idle, timeout_s, "all KV blocks are free again")

    def nats_bytes(self) -> int:
        """Bytes that the server has taken in since it started."""
        with urllib.request.urlopen(self.monitor_url + "/varz", timeout=5) as r:
            return int(json.load(r)["in_bytes"])

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 60.0) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as r:
                return r.status, json.load(r)
        except urllib.error.HTTPError as e:
            return e.code, json.loads(e.read() or b"{}")


class Watching:
    """A watch of the registry on a thread of its own, for tests that have no event loop."""

    def __init__(self, nats_url: str, ttl_s: float) -> None:
        self._nats_url = nats_url
        self._ttl_s = ttl_s
        self._ready = threading.Event()
        self._watch: Watch | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def snapshot(self) -> Mapping[str, WorkerInfo]:
        assert self._watch is not None
        return self._watch.snapshot

    async def _run(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        async with await NatsBus.connect(self._nats_url, name="test", registry_ttl_s=self._ttl_s) as bus:
            async with bus.registry().watch() as self._watch:
                self._ready.set()
                await self._leave.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join(10)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
