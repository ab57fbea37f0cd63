"""What the engine's thread does for a decode worker."""

import asyncio
import time
from collections.abc import Callable

from distserve.engine.batching import Batch, Sampled
from distserve.engine.runner import ModelRunner
from distserve.worker.engine_thread import EngineThread
from distserve_decode.live import Live


class Passes:
    def __init__(self, engine: EngineThread, runner: ModelRunner) -> None:
        self._engine = engine
        self._runner = runner

    def begin(self, batch: Batch) -> tuple[asyncio.Future[tuple[list[Sampled], float]], asyncio.Event]:
        """The pass, with when it ended on the monotonic clock, however busy the loop was then; and when it is past
        what needs Python, in which the loop would be in its way (or has ended)."""
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def tell() -> None:
            loop.call_soon_threadsafe(begun.set)

        running = self._engine.start(self._execute, batch, tell)
        running.add_done_callback(lambda _: begun.set())
        return running, begun

    def _execute(self, batch: Batch, on_begun: Callable[[], None]) -> tuple[list[Sampled], float]:
        return self._runner.execute(batch, on_begun=on_begun), time.monotonic()

    async def first_token(self, live: Live) -> Sampled:
        """decode.sample_first_token: from the last hidden state, as prefill would have drawn it."""
        assert live.arrival is not None
        hidden, dtype = live.arrival.hidden, live.arrival.hidden_dtype
        return await self._engine.run(self._runner.sample_from_hidden, live.sequence, hidden, dtype)
