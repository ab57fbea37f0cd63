"""Debian's Prometheus on a cluster of tests/cluster.py, with the project's own configuration and rules."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from prepare import find

from tests.cluster import free_port, wait_until

SETTINGS = Path(__file__).parents[2] / "deploy" / "prometheus"
SCRAPE_S = 1


def configuration(targets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """deploy/prometheus/prometheus.yml with these `host:port` in the place of the names that compose knows, and
    everything each second."""
    config: dict[str, Any] = yaml.safe_load((SETTINGS / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(SETTINGS / pattern) for pattern in config["rule_files"]]
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
    assert {job["job_name"] for job in config["scrape_configs"]} == set(targets)
    return config


class Prometheus:
    """`with Prometheus(folder, {"gateway": ["127.0.0.1:8000"], …}) as p:`"""

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]]) -> None:
        self._folder = folder
        self._num_targets = sum(map(len, targets.values()))
        self._config = configuration(targets)
        self.url = f"http://127.0.0.1:{free_port()}"

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        file, log = self._folder / "prometheus.yml", self._folder / "prometheus.log"
        file.write_text(yaml.safe_dump(self._config))
        command = [
            find("prometheus"),
            f"--config.file={file}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
            "--log.level=warn",
        ]
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_until(self._all_up, 60, "Prometheus has scraped everybody")
        except BaseException:
            print(log.read_text()[-3000:])
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _all_up(self) -> bool:
        assert self._process.poll() is None, "Prometheus has ended"
        try:
            return len(self.query("up == 1")) == self._num_targets
        except (OSError, ValueError):  # it has only just begun
            return False

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that it gives now. Raises ValueError for what is no PromQL."""
        found: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return found

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as r:
                return json.load(r)["data"]
        except urllib.error.HTTPError as e:
            raise ValueError(f"{parameters}: {e.read().decode(errors='replace')}") from None

    def wait_for_scrapes(self, num: int) -> None:
        """Until each service has been scraped so many times more."""
        began = time.time()
        wait_until(
            lambda: len(self.query(f"timestamp(up) > {began + (num - 1) * SCRAPE_S}")) == self._num_targets,
            30,
            "everybody is scraped again",
        )
