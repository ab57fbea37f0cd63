"""The one thread that runs the model. The event loop decides and owns all state; this thread only computes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it there and wait. A pass can't be interrupted: cancelling the waiter does not stop it."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Returns when the pass in progress has ended."""
        self._executor.shutdown(wait=True)
