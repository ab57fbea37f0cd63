"""Keeps service processes running: starts them, passes their output on line by line, starts them again when they
die, and stops them in order.

Each child is a process of its own group, so that a Ctrl-C in the terminal reaches the supervisor alone, and is told
the supervisor's pid, with which it dies (`lifecycle.die_with`). Only pids that were started here are ever signalled.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

REFUSED = 78  # EX_CONFIG of sysexits.h: a service's exit status when the same start would fail again

Emit = Callable[[str, str], None]  # a child's name (or "" for the supervisor itself), a line


@dataclass(frozen=True, slots=True)
class Spec:
    """One process to keep running. `id_variable` gets a fresh id for each of its lives: `<name>-<4 hex digits>`."""

    name: str
    role: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    id_variable: str = ""
    grace_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds before the n-th start in a row (n from 1): doubling, capped; forgotten after a life of `healthy_s`."""

    first_s: float = 0.5
    most_s: float = 30.0
    healthy_s: float = 60.0

    def delay_s(self, num_deaths: int) -> float:
        # The exponent is capped first: a worker that dies for a month must not overflow a float.
        return min(self.most_s, self.first_s * 2.0 ** min(num_deaths - 1, 32))


class Child:
    """One Spec's current process. Made and owned by Supervisor."""

    def __init__(self, spec: Spec, emit: Emit, backoff: Backoff, on_refused: Callable[[str], None]) -> None:
        self.spec = spec
        self.id = ""
        self.num_starts = 0
        self._emit = emit
        self._backoff = backoff
        self._on_refused = on_refused
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._wish: signal.Signals | None = None
        self._task = asyncio.create_task(self._keep(), name=f"keep {spec.name}")

    @property
    def pid(self) -> int | None:
        """Of the live process, else None."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def stop(self) -> None:
        """SIGTERM, the grace time, SIGKILL. Returns when the process is gone."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self._task}, timeout=self.spec.grace_s)
        if not done:
            self._emit("", f"{self.spec.name} did not end within {self.spec.grace_s:g} s: killed")
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL. Returns when the process is gone."""
        self._stopping.set()
        self._signal(signal.SIGKILL)
        await asyncio.wait({self._task}, timeout=10.0)

    def _signal(self, signum: signal.Signals) -> None:
        self._wish = signum
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def _keep(self) -> None:
        num_deaths = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            status = await self._run_once()
            lived_s = time.monotonic() - began
            if self._stopping.is_set():
                return
            if status == REFUSED:
                self._emit("", f"{self.spec.name} refused to start; its message is above. It is not started again")
                self._on_refused(self.spec.name)
                return
            num_deaths = 1 if lived_s >= self._backoff.healthy_s else num_deaths + 1
            delay_s = self._backoff.delay_s(num_deaths)
            times = f", {num_deaths} times in a row" if num_deaths > 1 else ""
            self._emit("", f"{self.spec.name} died ({_died(status)}, {lived_s:.1f} s{times}): again in {delay_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()

    async def _run_once(self) -> int:
        self.id = f"{self.spec.name}-{secrets.token_hex(2)}"
        self.num_starts += 1
        env = dict(self.spec.env) | ({self.spec.id_variable: self.id} if self.spec.id_variable else {})
        try:
            process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,
            )
        except OSError as e:
            self._emit("", f"{self.spec.name} can't be started: {e}")
            return 127
        self._process = process
        if self._wish is not None:  # asked to stop while it was being started
            self._signal(self._wish)
        pump = asyncio.create_task(self._pump(process))
        status = await process.wait()
        # What it wrote last is still in the pipe; a grandchild that holds the pipe open must not hold us up.
        await asyncio.wait({pump}, timeout=1.0)
        pump.cancel()
        return status

    async def _pump(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        while data := await process.stdout.read(65536):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > 65536:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._emit(self.spec.name, line.decode(errors="replace").rstrip("\r"))
        if rest:
            self._emit(self.spec.name, rest.decode(errors="replace"))


class Supervisor:
    """`async with` it: whatever still runs at the end is killed."""

    def __init__(self, emit: Emit, backoff: Backoff | None = None) -> None:
        self._emit = emit
        self._backoff = backoff or Backoff()
        self._children: dict[str, Child] = {}
        self.refused: list[str] = []  # names of children that won't be started again

    def start(self, spec: Spec) -> None:
        """Start it and keep it running. Names are unique."""
        if spec.name in self._children:
            raise ValueError(f"{spec.name} is running already")
        self._children[spec.name] = Child(spec, self._emit, self._backoff, self.refused.append)

    @property
    def children(self) -> Mapping[str, Child]:
        return self._children

    def pids(self) -> list[int]:
        """Of every process that is alive now."""
        return [c.pid for c in self._children.values() if c.pid is not None]

    async def stop(self, order: Iterable[str] = ()) -> None:
        """Stop role after role in `order`, then whatever is left; those of one role together."""
        roles = [*order, *(c.spec.role for c in self._children.values())]
        for role in dict.fromkeys(roles):
            leaving = [c for c in self._children.values() if c.spec.role == role]
            await asyncio.gather(*(c.stop() for c in leaving))
            for child in leaving:
                del self._children[child.spec.name]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        # Shielded: a second Ctrl-C cancels the task that is in here, and the children must go all the same.
        await asyncio.shield(asyncio.gather(*(c.kill() for c in self._children.values())))
        self._children.clear()


def service_command(role: str) -> tuple[str, ...]:
    """The command line of one service that dies with this process."""
    return (sys.executable, "-m", "distserve.cli", role, "--die-with", str(os.getpid()))


def _died(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
