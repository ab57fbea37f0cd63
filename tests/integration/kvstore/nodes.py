"""Store nodes for tests: in this process, where their books can be looked into, and as processes, to be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from distserve.bus.base import Watch
from distserve.config import Config, as_environment, load_config
from distserve.kv.layout import block_bytes
from distserve.lifecycle import Shutdown
from distserve_kvstore.main import Service, serve
from distserve_kvstore.node import Node
from tests.contracts.transport.pools import SMALL
from tests.integration.kvstore.bare_client import MODEL
from tests.waiting import until

BLOCK = block_bytes(SMALL)


def config_of(url: str, folder: Path, *, dram_blocks: int = 256, **settings: Any) -> Config:
    values = {
        "bus.url": url,
        "bus.beat_s": 0.2,
        "bus.ttl_s": 1.0,
        "model.name": MODEL,
        "model.path": MODEL,
        "kvstore.folder": str(folder),
        "kvstore.dram_bytes": dram_blocks * BLOCK,
        "kvstore.disk_bytes": 64 << 20,
        "kvstore.segment_bytes": 1 << 20,
        "kvstore.gc_interval_ms": 50,
        "kvstore.drain_s": 5.0,
    }
    return load_config(overrides=values | {f"kvstore.{name}": value for name, value in settings.items()})


@asynccontextmanager
async def running(config: Config, node_id: str = "kvstore-t") -> AsyncIterator[Node]:
    """A node that has learnt its layout, which somebody must tell it. Drained on leaving; all its books must agree
    then."""
    services: list[Service] = []
    shutdown = Shutdown(config.kvstore.drain_s)
    task = asyncio.create_task(serve(config, node_id, shutdown, started=services.append))
    try:
        await until(lambda: task.done() or bool(services and services[0].status == "ok"), 20, "the node's being ready")
        if task.done():
            task.result()
        node = services[0].node
        assert node is not None
        yield node
        if not task.done():
            node.check()
    finally:
        if not task.done() and not shutdown.requested:
            shutdown.request()
        await asyncio.wait({task}, timeout=20)
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.exception() is None if not task.cancelled() else True


class Process:
    """`distserve kvstore`, as it is started anywhere."""

    def __init__(self, config: Config, node_id: str, log: Path) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_")}
        env |= as_environment(config) | {"DISTSERVE_KVSTORE_ID": node_id}
        self.log = log
        self._out = log.open("wb")
        command = [sys.executable, "-m", "distserve.cli", "kvstore", "--die-with", str(os.getpid())]
        self._process = subprocess.Popen(command, env=env, stdout=self._out, stderr=subprocess.STDOUT)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(20)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        self._out.close()


@contextmanager
def process(config: Config, node_id: str, log: Path) -> Iterator[Process]:
    found = Process(config, node_id, log)
    try:
        yield found
    finally:
        found.close()


async def ready(watch: Watch, node_id: str, timeout_s: float = 20.0) -> None:
    """Returns when the registry has it, with a layout."""
    await watch.wait_for(
        lambda snapshot: node_id in snapshot and snapshot[node_id].status in ("ok", "degraded"), timeout_s
    )
