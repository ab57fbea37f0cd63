"""A server under test: one process tree of ours or of a peer's, started, waited for, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from benchmarks.load import MODEL
from benchmarks.load_cpu import born, children

_POLL_S = 0.05
_STOP_S = 30.0


class Server:
    """`with Server(...) as server:` starts it; `wait_ready()` returns when it answers. On leaving, SIGTERM to the
    process, then SIGKILL to what is left of the tree that was started here."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        port: int,
        health: str,
        is_whole: Callable[[bytes], bool] = lambda body: True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.port = port
        self.log = log
        self.started = 0.0  # time.time() when it was started
        self._command = list(command)
        self._env = dict(os.environ if env is None else env)
        self._health = f"http://127.0.0.1:{port}{health}"
        self._is_whole = is_whole
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Raises TimeoutError, RuntimeError if it ended; both with the end of its log."""
        deadline = time.monotonic() + timeout_s
        assert self._process is not None, "not started"
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with status {self._process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} was not ready within {timeout_s:g} s:\n{self.tail()}")
            time.sleep(_POLL_S)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._health, timeout=2) as answer:
                return bool(answer.status == 200) and self._is_whole(answer.read())
        except (OSError, urllib.error.HTTPError):
            return False

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self.started = time.time()
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if self._process is None:
            return
        tree = {pid: born(pid) for pid in children(self._process.pid)}
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_S)
        for pid, birth in tree.items():
            # A number that was given to somebody else by now is not ours to end.
            if pid != self._process.pid and birth and born(pid) == birth:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def orderly_end() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that no server outlives the benchmark."""

    def leave(signum: int, frame: FrameType | None) -> None:
        print("ended by SIGTERM: what follows is not the whole", file=sys.stderr, flush=True)
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def distserve_up(
    name: str,
    model: Path,
    log: Path,
    *,
    options: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    checkout: Path | None = None,
) -> Server:
    """`distserve up` on a free port. `checkout`: of another state of the project, to run its code with this one's
    dependencies."""
    port = free_port()
    command = [sys.executable, "-m", "distserve.cli", "up", "--model", str(model), "--port", str(port), *options]
    for key, value in {"model.name": MODEL, **(settings or {})}.items():
        command += ["--set", f"{key}={value}"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_") or k == "DISTSERVE_CACHE"}
    if checkout is not None:
        rooms = ("libs/common", "services/gateway", "services/prefill", "services/decode")
        env["PYTHONPATH"] = os.pathsep.join(str(checkout / room) for room in rooms)

    def has_prefill(health: bytes) -> bool:
        """A gateway that has only decode is ready, and has it compute prompts itself."""
        return "--colocated" in options or bool({"ok", "degraded"} & json.loads(health)["workers"]["prefill"].keys())

    return Server(name, command, log, port=port, health="/health", is_whole=has_prefill, env=env)
