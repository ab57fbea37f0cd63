"""A container engine of the tests' own: dockerd on a socket in a folder, started and ended by whoever enters it.

It touches nothing of the host beyond that folder and the images' (prepare.py's): no bridge of its own, no rules of
iptables, no forwarding. Containers of one network reach each other, and the host by the network's first address;
published ports are served by a proxy process. They reach no other network.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prepare import BASE_TAG, PROJECT, Prepared, find

COMPOSE_FOLDER = PROJECT / "deploy" / "compose"
OVERRIDES = PROJECT / "tests" / "compose" / "compose.test.yaml"
TARGETS = ("nats", "gateway", "kvstore", "prefill", "decode", "model")
BUILD_TIMEOUT_S = 900.0
KEPT = "8GB"  # of the layers of builds; the oldest beyond it are removed beside other work. One build takes 4 GB
_DOCKER = "/usr/bin/docker"  # docker.io's, which builds without a plugin; another may be before it on PATH
_WHEELS_PORT = 48321  # the same in every run, if it is free: it is part of what a layer is remembered by
_START_S, _STOP_S = 60.0, 60.0


class Engine:
    """`with Engine(prepared) as engine:`"""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = Path()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._prepared.docker.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((self._prepared.folder / "docker.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # one engine at a time on these images
            self.folder = Path(tempfile.mkdtemp(prefix="distserve-engine-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            with (self.folder / "log").open("wb") as log:
                self._process = subprocess.Popen(self._command(), stdout=log, stderr=subprocess.STDOUT)
            stack.callback(self._stop, self._process)
            self._wait_started()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def _command(self) -> list[str]:
        return [
            find("dockerd"),
            *("--data-root", str(self._prepared.docker), "--exec-root", str(self.folder / "exec")),
            *("--pidfile", str(self.folder / "pid"), "--host", self.host, "--log-level", "warn"),
            *("--config-file", str(self._configuration())),
            *("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
        ]

    def _configuration(self) -> Path:
        """What has no option."""
        path = self.folder / "daemon.json"
        path.write_text(json.dumps({"builder": {"gc": {"enabled": True, "defaultKeepStorage": KEPT}}}))
        return path

    def _wait_started(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while self.try_docker("version").returncode:
            log = (self.folder / "log").read_text(errors="replace")[-3000:]
            assert self._process.poll() is None, f"dockerd ended with status {self._process.returncode}:\n{log}"
            assert time.monotonic() < deadline, f"dockerd does not answer after {_START_S:g} s:\n{log}"
            time.sleep(0.1)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """It ends what it has started itself: containerd and every container."""
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            subprocess.run(["umount", str(self._prepared.docker)], timeout=30)  # it mounts its folder on itself

    # ------------------------------------------------------------ commands

    def try_docker(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return self._run([_DOCKER, *arguments], timeout_s, {})

    def docker(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """What it says. Fails the test with what it complains of."""
        return _said(self.try_docker(*arguments, timeout_s=timeout_s))

    def compose(self, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 120.0) -> str:
        """As docker(): compose.yaml with the tests' overrides."""
        files = ("-f", str(COMPOSE_FOLDER / "compose.yaml"), "-f", str(OVERRIDES))
        command = [self._prepared.tool("docker-compose"), "--progress", "plain", *files, *arguments]
        return _said(self._run(command, timeout_s, {"WHEELS": str(self._prepared.wheels), **(env or {})}))

    def inspect(self, *names: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", *names))
        return found

    def left(self) -> dict[str, list[str]]:
        """Containers, volumes and networks that there are, beyond docker's own networks."""
        networks = set(self.docker("network", "ls", "--format", "{{.Name}}").split()) - {"bridge", "host", "none"}
        return {
            "containers": self.docker("ps", "--all", "--quiet").split(),
            "volumes": self.docker("volume", "ls", "--quiet").split(),
            "networks": sorted(networks),
        }

    def _run(
        self, command: Sequence[str], timeout_s: float, env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        own = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "DOCKER_HOST": self.host, "DOCKER_BUILDKIT": "1"}
        return subprocess.run(
            command, env=own | dict(env), capture_output=True, text=True, errors="replace", timeout=timeout_s
        )

    # ------------------------------------------------------------ images

    def build(self) -> None:
        """Every image of the Dockerfile, from the base image and the wheels that prepare.py has laid ready. What has
        not changed since the last time is taken from there."""
        self._import_base()
        with Wheels(self._prepared.wheels) as url:
            for target in TARGETS:
                self.docker(
                    *("build", "--quiet", "--network", "host", "--file", str(COMPOSE_FOLDER / "Dockerfile")),
                    *("--build-arg", "PIP_NO_INDEX=1", "--build-arg", f"PIP_FIND_LINKS={url}"),
                    *("--build-arg", "ENGINE_PACKAGES="),
                    *("--target", target, "--tag", f"distserve/{target}:local", str(PROJECT)),
                    timeout_s=BUILD_TIMEOUT_S,
                )
        self.docker("image", "prune", "--force", timeout_s=120.0)

    def _import_base(self) -> None:
        made = (self._prepared.base_image.with_suffix(".made")).read_text()
        known = self.try_docker("image", "inspect", "--format", '{{index .Config.Labels "made"}}', BASE_TAG)
        if known.stdout.strip() == made:
            return
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        change = ("--change", f"ENV {path}", "--change", f"LABEL made={made}")
        self.docker("import", *change, str(self._prepared.base_image), BASE_TAG, timeout_s=120.0)


class Wheels:
    """`with Wheels(folder) as url:` serves a folder over HTTP on loopback, where pip finds links in it."""

    def __init__(self, folder: Path) -> None:
        handler = partial(_Quiet, directory=str(folder))
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", _WHEELS_PORT), handler)
        except OSError:
            self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}/"

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


def _said(done: subprocess.CompletedProcess[str]) -> str:
    command = " ".join(map(str, done.args))
    assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
