"""The traces of a gateway's requests: how each begins, and word to everybody of those that are kept after all."""

import asyncio
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import BusError
from distserve.messages import TracesKept, encode
from distserve.telemetry import Attributes, Span, begin, is_tracing, keep, receive, trace_id_of
from distserve_gateway.calls import Kind
from distserve_gateway.request_trace import NO_TRACE, RequestTrace

log = logging.getLogger(__name__)

GATHER_S = 0.1  # one message for all that were decided meanwhile
MAX_IDS = 1024  # a message stays below 20 KB
END_S = 1.0  # for the last message

_OPERATIONS: dict[Kind, str] = {"chat": "chat", "completion": "text_completion", "generate": "text_completion"}
_NAMES: dict[Kind, str] = {"chat": "chat", "completion": "text_completion", "generate": "generate"}


class Traces:
    """`async with` it around all doors. Belongs to the event loop."""

    def __init__(self, bus: Bus, model: str) -> None:
        self._bus = bus
        self._model = model
        self._kept: dict[bytes, None] = {}
        self._wake = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if is_tracing():
            self._sending = asyncio.create_task(self._send(), name="traces")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._sending is None:
            return
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        try:
            async with asyncio.timeout(END_S):
                await self._publish()
                await self._bus.flush(END_S)
        except (BusError, TimeoutError) as problem:
            log.info("the last traces to keep were not told: %s", problem or "no time left")

    def begin(self, kind: Kind, headers: Mapping[str, str], attributes: Attributes) -> RequestTrace:
        """Of a request that has come; `headers` may name its caller's span. `attributes`: of its door."""
        if not is_tracing():
            return NO_TRACE
        caller = receive(headers)
        root = begin(
            f"{_NAMES[kind]} {self._model}",
            caller if caller.get_span_context().is_valid else None,
            kind="server",
            attributes={
                "gen_ai.operation.name": _OPERATIONS[kind],
                "gen_ai.provider.name": "distserve",
                "gen_ai.request.model": self._model,
                **attributes,
            },
        )
        return RequestTrace(root, self._keep)

    def _keep(self, root: Span) -> None:
        trace_id = trace_id_of(root)
        keep([trace_id])
        self._kept[trace_id] = None
        self._wake.set()

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            try:
                await self._publish()
            except BusError as e:
                log.info("which traces are kept was not told: %s", e)

    async def _publish(self) -> None:
        ids, self._kept = list(self._kept), {}
        for i in range(0, len(ids), MAX_IDS):
            await self._bus.publish(subjects.traces(), encode(TracesKept(trace_ids=ids[i : i + MAX_IDS])))
