"""One request at the fallback server, whose answer fills an inbox as a worker's tokens do."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Literal

from distserve.errors import DistServeError
from distserve.telemetry import Span, begin, headers_of
from distserve_gateway.fallback import Fallback
from distserve_gateway.fallback_chunk import Choice, Chunk
from distserve_gateway.live import Gain, Inbox
from distserve_gateway.request_trace import end_span
from distserve_gateway.running import Run

log = logging.getLogger(__name__)

ENDED = -1  # index of the gain that says: nothing more will come


class Relay:
    """From start() until close(), or its end. `gains` makes of a choice what the inbox gets; an error is put there too,
    and the last gain if there was none. After `begun` the first chunk is there, or `problem`."""

    def __init__(
        self,
        fallback: Fallback,
        run: Run,
        inbox: Inbox,
        gains: Callable[[Choice], Iterable[Gain]],
        *,
        reason: Literal["breaker", "first_token"],
    ) -> None:
        self.begun = asyncio.Event()
        self.problem: DistServeError | None = None
        self.num_output_tokens: int | None = None  # as it counts them; None: it has not said
        self.num_cached_tokens = 0
        self._fallback = fallback
        self._run = run
        self._inbox = inbox
        self._gains = gains
        self._reason = reason  # that it goes there, for its trace
        self._task: asyncio.Task[None] | None = None

    def start(self, path: str, body: bytes) -> None:
        self._task = self._fallback.begin(self._run, self._fill(path, body))

    def close(self) -> None:
        """Cuts the connection, by which the server sees that nobody waits. Idempotent."""
        task, self._task = self._task, None
        if task is not None:  # once: a second cancel would interrupt the closing of the connection
            task.cancel()

    async def _fill(self, path: str, body: bytes) -> None:
        span = self._span(path)
        try:
            await self._fallback.stream(path, body, self._run.call.request_id, self._take, headers_of(span))
            self._inbox.put(Gain(ENDED, []))
        except DistServeError as e:
            self._fail(e)
        except Exception:
            log.exception("%s: the fallback server's answer could not be read", self._run.call.request_id)
            self._fail(DistServeError("internal error"))
        finally:
            end_span(span, self.problem)  # cancelled, it has none: the client is gone, or has enough

    def _span(self, path: str) -> Span:
        attributes = {
            "distserve.fallback.reason": self._reason,
            "gen_ai.request.model": self._fallback.model,
            "http.request.method": "POST",
            "server.address": self._fallback.name,
            "url.path": path,
        }
        return begin("fallback", self._run.call.trace.root, kind="client", attributes=attributes)

    def _take(self, chunk: Chunk) -> None:
        if chunk.usage is not None:
            self.num_output_tokens = chunk.usage.completion_tokens
            self.num_cached_tokens = chunk.usage.cached_tokens
        for choice in chunk.choices:
            for gain in self._gains(choice):
                self._inbox.put(gain)
        self.begun.set()

    def _fail(self, problem: DistServeError) -> None:
        self.problem = problem
        self._inbox.put(Gain(0, [], error=problem))
        self.begun.set()
