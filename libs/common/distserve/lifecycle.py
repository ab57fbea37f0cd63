"""The life of a service process: signals, drain, end.

The first SIGTERM or SIGINT asks the service to drain: it takes nothing new and finishes within its grace time. The
second one ends it at once. A service composes what it owns in one AsyncExitStack and waits on `Shutdown`:

    async def serve(shutdown: Shutdown) -> None:
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(...)
            await shutdown.wait()
            await drain(shutdown.remaining_s())

    run_service(serve, grace_s=config.decode.drain_s)
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

_PR_SET_PDEATHSIG = 1
_LAST_RESORT_S = 3.0  # after a second signal: unwinding may take this long, then the process just ends


class Shutdown:
    """What has been asked of this process. Belongs to the event loop."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._requested = asyncio.Event()
        self._deadline = float("inf")
        self._on_second: Callable[[], None] = lambda: None

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    async def wait(self) -> None:
        """Returns when the process was asked to leave. Has no deadline: that is a server's life."""
        await self._requested.wait()

    def remaining_s(self) -> float:
        """Seconds left of the grace time; the whole of it before the first signal; never negative."""
        return self.grace_s if not self.requested else max(0.0, self._deadline - time.monotonic())

    def request(self) -> None:
        """Ask to drain; asked again, end at once. What the signals do, and tests."""
        if self.requested:
            self._on_second()
            return
        self._deadline = time.monotonic() + self.grace_s
        self._requested.set()

    async def run_until_requested(self, work: Awaitable[object]) -> bool:
        """Run `work` and stop waiting, cancelling it, once the process was asked to leave. True if it finished.

        An exception of `work` is raised here."""
        task = asyncio.ensure_future(work)
        leave = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait({task, leave}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            await task
            return True
        finally:
            for t in (task, leave):
                t.cancel()
            await asyncio.gather(task, leave, return_exceptions=True)


def run_service(serve: Callable[[Shutdown], Awaitable[None]], *, grace_s: float, fast_loop: bool = True) -> None:
    """Run a service's coroutine in a fresh event loop (uvloop where it is installed, if fast_loop) until it returns.

    Raises what it raises; SystemExit(130) when a second signal cut it short.
    """
    with asyncio.Runner(loop_factory=_loop_factory() if fast_loop else None) as runner:
        runner.run(_serve(serve, grace_s))


async def _serve(serve: Callable[[Shutdown], Awaitable[None]], grace_s: float) -> None:
    loop = asyncio.get_running_loop()
    shutdown = Shutdown(grace_s)
    main = asyncio.ensure_future(serve(shutdown))

    def at_once() -> None:
        # A blocked loop or a thread that won't end must not keep the process: the timer is outside both.
        last_resort = threading.Timer(_LAST_RESORT_S, os._exit, (130,))
        last_resort.daemon = True
        last_resort.start()
        main.cancel()

    shutdown._on_second = at_once
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, shutdown.request)
    try:
        await main
    except asyncio.CancelledError:
        if shutdown.requested:
            raise SystemExit(130) from None
        raise
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None


def new_id(role: str) -> str:
    """A worker's id: one for each life of a process, so that messages to a dead one never reach its successor."""
    return f"{role}-{secrets.token_hex(4)}"


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends in any way, kill -9 included (Linux).

    Call it early; a parent that is gone already ends the process here. (A service keeps nothing on disk, so there is
    nothing to tidy that SIGKILL would skip.)
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def settle_garbage() -> None:
    """What has been loaded stays: keep the collector from looking at it again and again, and have it run after every
    10,000 new objects instead of 700. Call it before the first beat and the first request: the one look it takes here
    is as long as several beats on a busy machine."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


# Becomes a program after it has asked the kernel (PR_SET_PDEATHSIG = 1) to be ended with its parent. Done in a process
# of its own because code between fork and exec is unsafe in a parent that has threads.
_LAUNCH = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, int(sys.argv[2]), 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[3], sys.argv[3:])
"""


def dying_with_us(command: Sequence[str], sig: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command, for Popen on the main thread, of a program (an absolute path) that gets `sig` when we die, however
    that is."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), str(int(sig)), *command]
