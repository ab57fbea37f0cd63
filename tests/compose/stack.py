"""The cluster that `docker compose up` starts, as a test sees it from the host."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.compose.engine import Engine

HOST = "10.199.77.1"  # the test machine, as containers see it (compose.test.yaml)
SERVICES = {"nats": 1, "gateway": 1, "kvstore": 1, "prefill": 1, "decode": 2}  # and so many containers
METRICS_PORTS = {"gateway": 8000, "prefill": 9101, "decode": 9102, "kvstore": 9103}
UP_TIMEOUT_S = 420.0  # the first time with a model to convert, on two cores that others use too


class Stack:
    def __init__(self, engine: Engine, *, otlp_port: int) -> None:
        self.engine = engine
        self.port = _free_port()
        self._env = {
            "COMPOSE_PROFILES": "cpu",
            "PORT": str(self.port),
            "NATS_PORT": str(_free_port()),
            "OTLP_ENDPOINT": f"http://{HOST}:{otlp_port}",
            "KVSTORE_DRAM": "64MiB",
            "KVSTORE_DISK": "1GiB",
            "MEMORY_FRACTION": "0.1",
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def nats_url(self) -> str:
        """As `client`."""
        return f"nats://client:client@127.0.0.1:{self._env['NATS_PORT']}"

    def compose(self, *arguments: str, timeout_s: float = 120.0) -> str:
        return self.engine.compose(*arguments, env=self._env, timeout_s=timeout_s)

    def up(self) -> None:
        """Returns when every container is healthy. Containers that run are left as they are."""
        self.compose("up", "--detach", "--no-build", "--pull", "never", "--wait", timeout_s=UP_TIMEOUT_S)

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "20")

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "60")

    # ------------------------------------------------------------ containers

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """As `docker compose ps` has them: Name, Service, State, Health…; the one that has ended too."""
        listed = self.compose("ps", "--all", "--format", "json", *([service] if service else []))
        return [json.loads(line) for line in listed.splitlines()]

    def names(self, service: str) -> list[str]:
        return sorted(c["Name"] for c in self.containers(service))

    def address(self, name: str) -> str:
        networks = self.engine.inspect(name)[0]["NetworkSettings"]["Networks"]
        return str(networks["distserve"]["IPAddress"])

    # ------------------------------------------------------------ what services say

    def get(self, url: str) -> tuple[int, str]:
        """Status and body."""
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()

    def metrics(self, name: str, service: str) -> dict[str, float]:
        """Sums over labels, of one container."""
        status, text = self.get(f"http://{self.address(name)}:{METRICS_PORTS[service]}/metrics")
        assert status == 200, text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
