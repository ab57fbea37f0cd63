"""A driver is a process that puts and gets in one store's own way, asked by lines of JSON. Standard library only.

Asked: {"verb": "put" | "get" | "clear" | "wait", "turn": number}. Values of two turns have different names and
contents. The answer: {"seconds": of the work alone} or {"error": text}. Before the first line the driver says
{"ready": true}.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO, cast

READY_S = 120.0
ANSWER_S = 90.0
STOP_S = 20.0


class DriverError(Exception):
    """What a driver could not do, in its words."""


class Store(Protocol):
    """A store's client. put and get return seconds and raise if anything is missing or wrong."""

    def put(self, turn: int) -> float: ...

    def get(self, turn: int) -> float: ...

    def clear(self, turn: int) -> None: ...


class Waits(Protocol):
    """A Store may have this too."""

    def wait(self) -> None:
        """Until a server that has come since the last put is there."""


def own_stdout() -> TextIO:
    """Standard output for answers alone: what libraries print goes to standard error from here on."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(store: Store, answers: TextIO, lines: Iterable[str] = sys.stdin) -> None:
    """Until standard input ends."""
    print(json.dumps({"ready": True}), file=answers)
    for line in lines:
        print(json.dumps(answer(store, json.loads(line))), file=answers)


def answer(store: Store, asked: Mapping[str, Any]) -> dict[str, Any]:
    verbs: dict[str, Callable[[int], float | None]] = {"put": store.put, "get": store.get, "clear": store.clear}
    try:
        if asked["verb"] == "wait":
            cast(Waits, store).wait()
            return {"seconds": None}
        return {"seconds": verbs[asked["verb"]](asked["turn"])}
    except Exception as e:  # whatever a peer raises is told, not hidden in a traceback of another process
        return {"error": f"{type(e).__name__}: {e}"}


class Driver:
    """The near end. `with` it: the process is started, and ended."""

    def __init__(self, command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._log = log
        self._env = dict(os.environ if env is None else env)
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                cwd=Path(__file__).parents[1],
            )
        return self

    def wait_ready(self) -> None:
        """Raises DriverError with the end of its log."""
        if self._line(READY_S) != {"ready": True}:
            raise DriverError(f"not ready: {self.tail()}")

    def ask(self, verb: str, turn: int) -> float:
        """Seconds that the work took. Raises DriverError: refused, wrong, dead, or silent for ANSWER_S."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"verb": verb, "turn": turn}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as e:
            raise DriverError(f"it has ended: {self.tail()}") from e
        said = self._line(ANSWER_S)
        if "error" in said:
            raise DriverError(said["error"])
        return float(said["seconds"] or 0.0)

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-1500:].strip()

    def _line(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        fd, deadline = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise DriverError(f"no answer within {timeout_s:g} s: {self.tail()}")
            got = os.read(fd, 65_536)
            if not got:
                raise DriverError(f"it has ended with status {self._process.wait(5)}: {self.tail()}")
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # dead already
            self._process.stdin.close()  # which is how it is asked to end
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
        self._process.stdout.close()
