#!/usr/bin/env python3
"""Makes the pictures of docs/monitor.md and docs/dashboards.md: SmolLM2 under load for some minutes, scraped by
Debian's Prometheus, and what the monitor and the dashboards show of it.

    python docs/pictures.py [SECONDS]

The dashboards are drawn with Matplotlib from their JSON, each query put to Prometheus: what Grafana would show, not as
it would look.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "deploy/compose"), str(ROOT / "docs")]

import msgspec  # noqa: E402
from drawing import draw  # noqa: E402
from rich.console import Console  # noqa: E402

from distserve.models.fetch import fetch  # noqa: E402
from distserve.monitor.picture import Picture  # noqa: E402
from distserve.monitor.source import Source  # noqa: E402
from tests.cluster import Cluster  # noqa: E402
from tests.compose.prometheus import Prometheus  # noqa: E402

IMAGES = ROOT / "docs" / "images"
NUM_USERS = 4
SETTINGS = {"breaker.mode": "on", "breaker.ttft_p99_ms": 5000, "kv.num_blocks": 600, "transport.kind": "tcp"}


class Users:
    """Each holds a conversation after another; every other one is promised a first token."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._leave = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(NUM_USERS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._leave.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._leave.is_set():
            messages = [
                {"role": "user", "content": f"Tell me about number {rng.randrange(1000)}. " * rng.randrange(2, 12)}
            ]
            for _ in range(3):
                body: dict[str, Any] = {"messages": messages, "max_tokens": rng.randrange(16, 64), "model": "smollm2"}
                if number % 2:
                    body |= {"priority": "vip", "ttft_slo_ms": 2000}
                status, answer = self._cluster.post("/v1/chat/completions", body)
                if status != 200 or self._leave.wait(rng.random()):
                    break
                said = answer["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]


def main(seconds: float) -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Cluster(
            fetch("smollm2"), folder / "c", decode=[{}, {}], kvstore=[{}], settings=SETTINGS, name="smollm2"
        ) as c:
            targets = {"gateway": [c.url.removeprefix("http://")]}
            for info in c.registry().values():
                if info.role != "gateway":
                    targets.setdefault(info.role, []).append(info.http_url.removeprefix("http://"))
            with Prometheus(folder / "p", targets) as prometheus:
                users, source = Users(c), Source(c.url)
                ends = time.monotonic() + seconds
                while time.monotonic() < ends:
                    status = source.status()  # whose rates are of what it saw while somebody looked
                    time.sleep(1)
                monitor(status)
                for file in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json")):
                    board = json.loads(file.read_text())
                    draw(board, prometheus, time.time() - seconds, IMAGES / f"dashboard-{file.stem}.png")
                users.stop()


def monitor(status: msgspec.Struct) -> None:
    with open("/dev/null", "w") as nowhere:
        console = Console(width=120, height=40, record=True, file=nowhere, highlight=False, force_terminal=True)
        console.print(Picture(status, 38, foot="q quits   every 1.00 s   http://127.0.0.1:8000"))  # type: ignore[arg-type]
        svg = console.export_svg(title="distserve monitor")
    # The reader's own font: nothing is fetched from elsewhere to look at it.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
    (IMAGES / "monitor.svg").write_text(svg)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 240.0)
