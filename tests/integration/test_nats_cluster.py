"""The registry on a cluster of three NATS servers, one of which goes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from distserve.bus import subjects
from distserve.bus.embedded import find_nats_server
from distserve.bus.nats import NatsBus
from distserve.errors import BusError
from distserve.messages import WorkerInfo

NUM_SERVERS = 3
ELECTION_S = 30.0  # JetStream's servers wait 4 to 9 s for a leader that is silent


def free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class Servers:
    """By number. `url` names all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = free_ports(NUM_SERVERS)
        self._routes = free_ports(NUM_SERVERS)
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in self._ports)
        self.processes = [self._start(i) for i in range(NUM_SERVERS)]

    def _start(self, i: int) -> subprocess.Popen[bytes]:
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes)
        config = self._folder / f"{i}.conf"
        config.write_text(
            f'server_name: "{i}"\n'
            f'listen: "127.0.0.1:{self._ports[i]}"\n'
            f'jetstream {{ store_dir: "{self._folder / str(i)}" }}\n'
            f'cluster {{ name: three, listen: "127.0.0.1:{self._routes[i]}", routes: [{routes}] }}\n'
        )
        with (self._folder / f"{i}.log").open("wb") as log:
            env = {"GOMAXPROCS": "1"} | os.environ
            return subprocess.Popen([find_nats_server(), "--config", str(config)], stderr=log, env=env)

    def end(self, i: int, how: signal.Signals = signal.SIGKILL) -> None:
        self.processes[i].send_signal(how)
        self.processes[i].wait(20)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    for i in range(NUM_SERVERS):
        servers.end(i)


async def connected(url: str) -> NatsBus:
    """Once the servers have found each other and a leader."""
    bus = await NatsBus.connect(url, name="test")
    deadline = time.monotonic() + ELECTION_S
    while not await beat(bus):
        assert time.monotonic() < deadline, "the servers are no cluster yet"
        await asyncio.sleep(0.2)
    return bus


INFO = WorkerInfo(worker_id="decode-1", role="decode", model="tiny", status="ok")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_registry_goes_on_without_the_server_that_led_its_bucket(
    servers: Servers, how: signal.Signals
) -> None:
    bus = await connected(servers.url)
    async with bus, bus.registry().watch() as watch:
        raw = await bus.request(f"$JS.API.STREAM.INFO.KV_{subjects.REGISTRY_BUCKET}", b"", timeout_s=5.0)
        told = json.loads(raw)
        assert told["config"]["num_replicas"] == NUM_SERVERS
        at = time.monotonic()
        servers.end(int(told["cluster"]["leader"]), how)
        while not await beat(bus):
            assert time.monotonic() - at < ELECTION_S, f"no beat was taken within {ELECTION_S:g} s"
            await asyncio.sleep(0.2)
        print(f"{how.name}: a beat was taken {time.monotonic() - at:.1f} s after it")
        await watch.wait_for(lambda infos: "decode-1" in infos, timeout_s=5.0)
        left = await connected(servers.url)  # who comes now finds it too
        async with left, left.registry().watch() as later:
            assert "decode-1" in later.snapshot


async def beat(bus: NatsBus) -> bool:
    try:
        await bus.registry().put(INFO)
    except BusError as e:
        print(e)
        return False
    return True
