"""NVIDIA's MPS daemon of a cluster on one machine: processes' kernels run on a GPU side by side instead of in turns,
each within its share (worker/mps.py).

`nvidia-cuda-mps-control -f` in a folder of its own, so that neither somebody else's daemon nor its clients are touched;
it starts the server when the first worker opens the GPU. One that runs already, where the environment points, is used
as it is.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from distserve.errors import ConfigError
from distserve.lifecycle import dying_with_us
from distserve.supervisor import Emit
from distserve.worker import mps

PROGRAM = "nvidia-cuda-mps-control"
_START_S = 10.0
_STOP_S = 10.0
_POLL_S = 0.05


class OwnMps:
    """`async with` it. `env`: what workers need to find the daemon; empty if none is `wanted`."""

    def __init__(self, emit: Emit, *, wanted: bool, program: str = PROGRAM) -> None:
        self.env: dict[str, str] = {}
        self._emit = emit
        self._wanted = wanted
        self._program = program
        self._folder = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of our daemon, None if there is none."""
        return self._process.pid if self._process is not None else None

    async def __aenter__(self) -> Self:
        """Raises ConfigError if a daemon is wanted and can't be had."""
        if not self._wanted or not mps.problem(os.environ):
            return self
        program = shutil.which(self._program)
        if program is None:
            raise _not_there(f"{self._program} is not there: it comes with NVIDIA's driver")
        try:
            # On this thread, though it takes a millisecond: the kernel ends the daemon with the thread that started it.
            process = self._start(program)
            await self._listening(process)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._stop))
            raise
        self._emit("", f"MPS: {self._program} runs, process {process.pid}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        # Shielded: a second Ctrl-C cancels the task that is in here, and the daemon must go all the same.
        await asyncio.shield(asyncio.to_thread(self._stop))

    def _start(self, program: str) -> subprocess.Popen[bytes]:
        self._folder = tempfile.mkdtemp(prefix="distserve-mps-")
        self.env = {mps.PIPES: f"{self._folder}/pipe", mps.LOGS: f"{self._folder}/log"}
        for name in self.env.values():
            Path(name).mkdir()
        self._process = subprocess.Popen(
            dying_with_us([program, "-f"], signal.SIGTERM),
            env=os.environ | self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self._process

    async def _listening(self, process: subprocess.Popen[bytes]) -> None:
        give_up = time.monotonic() + _START_S
        while why := mps.problem(self.env):
            if (status := process.poll()) is not None:
                raise _not_there(f"{self._program} ended with status {status}: {_last_words(self.env)}")
            if time.monotonic() > give_up:
                raise _not_there(f"{self._program} does not listen after {_START_S:g} s: {why}")
            await asyncio.sleep(_POLL_S)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                # Asked, it ends its server too; a signal would leave that.
                subprocess.run(
                    [self._program], input=b"quit\n", env=os.environ | self.env, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, timeout=_STOP_S, check=False,
                )  # fmt: skip
                process.wait(_STOP_S)
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its server too
        if process is not None:
            process.wait(_STOP_S)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _last_words(env: Mapping[str, str]) -> str:
    try:
        lines = Path(env[mps.LOGS], "control.log").read_text(errors="replace").strip().splitlines()
    except OSError:
        return "it left no log"
    return lines[-1] if lines else "it left an empty log"


def _not_there(why: str) -> ConfigError:
    return ConfigError(
        f"prefill.mps_percentage or decode.mps_percentage is set, and MPS can't be had: {why}",
        key="prefill.mps_percentage",
        expected="0 for both, or a machine on which nvidia-cuda-mps-control runs",
    )
