"""A guest as its user sees it: commands that run in it, several at once."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roce_lab.errors import LabError, LabTimeout

SHARED = Path("/tmp/lab")  # the shared folder, as a guest sees it
_START_S = 30.0
_KILL_S = 20.0

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TMPDIR": "/run/lab-tmp",  # /tmp is the machine's own
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",  # the guests reach each other and nothing else
    "PYTHONUNBUFFERED": "1",
}


class Wire(Protocol):
    """How orders reach a guest's agent."""

    def __call__(self, **order: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Result:
    """status: as a shell has it, 128 + the signal's number for one that was killed. output: both streams, merged."""

    status: int
    output: str
    seconds: float


class Process:
    """A command in a guest. Its output, both streams, grows in the file `output` here."""

    def __init__(self, number: int, what: str, output: Path, send: Wire) -> None:
        self.what = what
        self.output = output
        self.pid = 0  # in the guest
        self.status: int | None = None
        self.refusal = ""
        self._number = number
        self._send = send
        self._changed = threading.Condition()

    def hear(self, event: Mapping[str, Any]) -> None:
        """An event of the agent."""
        with self._changed:
            match event["event"]:
                case "started":
                    self.pid = event["pid"]
                case "ended":
                    code = event["status"]
                    self.status = code if code >= 0 else 128 - code
                case "refused":
                    self.status, self.refusal = 127, event["reason"]
                case "gone" if self.status is None:
                    self.status, self.refusal = 255, "the guest is gone"
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> int:
        """Its exit status. Raises LabTimeout; the command goes on then."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.status is not None, timeout_s):
                raise LabTimeout(f"{self.what} has not ended within {timeout_s:g} s; its output ends:\n{self.tail()}")
            assert self.status is not None
            return self.status

    def wait_started(self, timeout_s: float = _START_S) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.pid or self.status is not None, timeout_s):
                raise LabTimeout(f"{self.what} has not started within {timeout_s:g} s")
        if self.refusal:
            raise LabError(f"{self.what} did not start: {self.refusal}")

    def wait_for(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """Until its output matches (re.search). Raises LabError if it ends without, LabTimeout at the deadline."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.status is not None
            if found := re.search(pattern, self.text()):
                return found
            if ended:
                raise LabError(f"{self.what} ended with status {self.status} before {pattern!r}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise LabTimeout(f"{self.what} has not said {pattern!r} within {timeout_s:g} s:\n{self.tail()}")
            with self._changed:  # woken early when it ends; a file in a shared folder tells nobody that it grew
                self._changed.wait(0.1)

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def tail(self, num_chars: int = 3000) -> str:
        return self.text()[-num_chars:]

    def write(self, text: str) -> None:
        """To its standard input, if it was started with `stdin`."""
        self._send(op="input", id=self._number, text=text)

    def close_input(self) -> None:
        self._send(op="input", id=self._number, text=None)

    def signal(self, number: int) -> None:
        """To it and to all that it has started. Nothing happens if it has ended."""
        if self.status is None:
            self._send(op="signal", id=self._number, signal=int(number))

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> int:
        """kill -9, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        return self.wait(_KILL_S)


class Host:
    """One of the two. `address` is its own on the RoCE network, `node` 1 or 2. shared: the shared folder here; seen_as:
    the same in the guest."""

    def __init__(self, node: int, shared: Path, *, seen_as: Path = SHARED) -> None:
        self.node = node
        self.address = f"10.77.0.{node}"
        self.shared = shared
        self._seen_as = seen_as
        self._outputs = shared / ".output"
        self._outputs.mkdir(exist_ok=True)
        self._processes: dict[int, Process] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._send: Wire | None = None
        self.last_words: Callable[[], str] = str  # what its console said last
        self.ready = threading.Event()
        self.gone = False

    def attach(self, send: Wire) -> None:
        self._send = send

    def hear(self, event: dict[str, Any]) -> None:
        """An event of this guest's agent."""
        if event["event"] in ("ready", "gone"):
            self.gone = event["event"] == "gone"
            self.ready.set()
        with self._lock:
            if self.gone:
                processes = list(self._processes.values())
            else:
                processes = [p for n, p in self._processes.items() if n == event.get("id")]
            if event["event"] in ("ended", "refused"):
                self._processes.pop(event["id"], None)
        for process in processes:
            process.hear(event)

    def start(
        self,
        command: str | Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = SHARED,
        name: str = "",
        stdin: bool = False,
    ) -> Process:
        """Start a command: text goes to bash, a sequence is run as it is. env is on top of ENVIRONMENT and of NODE
        (1 or 2). cwd is a folder of the guest. stdin: keep an input open to write to; else it is empty. Returns when it
        has started; raises LabError if it can't be."""
        arguments = ["/bin/bash", "-c", command] if isinstance(command, str) else [str(c) for c in command]
        what = name or (command if isinstance(command, str) else shlex.join(arguments))
        number = next(self._numbers)
        file = f"{self.node}-{number:03}.txt"
        process = Process(number, f"host {self.node}: {what[:200]}", self._outputs / file, self._order)
        with self._lock:
            self._processes[number] = process
        self._order(
            op="start",
            id=number,
            command=arguments,
            env={**ENVIRONMENT, "NODE": str(self.node), **(env or {})},
            cwd=os.fspath(cwd),
            output=str(self._seen_as / ".output" / file),
            input=stdin,
        )
        process.wait_started()
        return process

    def run(
        self,
        command: str | Sequence[str | Path],
        timeout_s: float = 60.0,
        *,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = SHARED,
        name: str = "",
        on_output: Callable[[str], None] | None = None,
    ) -> Result:
        """Start it and wait. Past timeout_s it is killed and LabTimeout raised; with `check`, LabError if its status
        isn't 0. on_output gets the output piece by piece, as it comes."""
        begun = time.monotonic()
        process = self.start(command, env=env, cwd=cwd, name=name)
        try:
            status = follow(process, timeout_s, on_output) if on_output else process.wait(timeout_s)
        except BaseException:
            process.kill()
            raise
        if check and status:
            raise LabError(f"{process.what} ended with status {status}:\n{process.tail()}")
        return Result(status, process.text(), time.monotonic() - begun)

    def set_clock(self) -> None:
        self._order(op="clock", time_ns=time.time_ns())

    def _order(self, **order: Any) -> None:
        if self._send is None or self.gone:
            raise LabError(f"host {self.node} does not run")
        self._send(**order)


def follow(process: Process, timeout_s: float, on_output: Callable[[str], None]) -> int:
    """Pass on what a process prints until it ends; its status. Raises LabTimeout."""
    deadline = time.monotonic() + timeout_s
    process.output.touch()
    with process.output.open(errors="replace") as output:
        while True:
            try:
                status = process.wait(0.1)
            except LabTimeout:
                status = -1
            if text := output.read():
                on_output(text)
            if status >= 0:
                return status
            if time.monotonic() > deadline:
                raise LabTimeout(f"{process.what} has not ended within {timeout_s:g} s; output ends:\n{process.tail()}")
