"""The one thread that runs the model. The event loop decides and owns all state; this thread only computes."""

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def timed(function: Callable[P, T]) -> Callable[P, tuple[T, float]]:
    """With the seconds that it took there, without those for which a busy event loop let its outcome lie."""

    def run(*args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
        began_at = time.perf_counter()
        outcome = function(*args, **kwargs)
        return outcome, time.perf_counter() - began_at

    return run


class EngineThread:
    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    def start(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run it there, after what was started before. It can't be interrupted: cancelling the future stops nothing."""
        return asyncio.get_running_loop().run_in_executor(self._executor, functools.partial(function, *args, **kwargs))

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Start it and wait for its outcome."""
        return await self.start(function, *args, **kwargs)

    def close(self) -> None:
        """Returns when the pass in progress has ended."""
        self._executor.shutdown(wait=True)
