"""A store that finds, brings and takes what a test says, when it says so: for timing that a real one can't be made to
show."""

import asyncio
from collections.abc import Sequence

from distserve import telemetry
from distserve.kv.hashing import Chain, pack
from distserve.telemetry import NO_SPAN
from distserve.transport.base import Span
from distserve.worker.store.found import Found, Piece, Pin, Source
from distserve.worker.store.offers import Label


class ScriptedSink:
    def __init__(self, first: int, block_ids: Sequence[int], label: Label) -> None:
        self.first = first
        self.block_ids = list(block_ids)
        self.label = label
        self.spans: list[Span] = []
        self.ends: list[str] = []

    def layers_ready(self, span: Span, *, awaited: bool = False) -> None:
        self.spans.append(span)

    def finished(self) -> None:
        self.ends.append("finished")

    def abandoned(self) -> None:
        self.ends.append("abandoned")


class ScriptedStore:
    """Client and all. It has the first `num_blocks` blocks of every chain; of a fetch so many come as `brings` says."""

    idle = True

    def __init__(self) -> None:
        self.client = self
        self.num_blocks = 0
        self.brings = 1 << 20
        self.error: Exception | None = None  # of a fetch
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_come = asyncio.Event()
        self.may_come.set()
        self.sought: list[tuple[int, int, str]] = []  # first, stop, holder
        self.fetched_to: list[list[int]] = []
        self.num_released = 0
        self.num_writing = 0  # fetches that may still write
        self.sinks: list[ScriptedSink] = []
        self.drained: list[float] = []
        self.told: list[tuple[str, telemetry.Span]] = []  # what was asked for, and for whose trace

    def may_find(self, holder: str = "") -> bool:
        return self.num_blocks > 0

    async def lookup(
        self, chain: Chain, first: int, *, stop: int | None = None, holder: str = "", span: telemetry.Span = NO_SPAN
    ) -> Found:
        self.told.append(("lookup", span))
        stop = len(chain) if stop is None else stop
        self.sought.append((first, stop, holder))
        await self.may_answer.wait()
        hashes = chain.hashes[first : min(stop, self.num_blocks)]
        pin = Pin(Source("kvstore", "node"), 1)
        return Found(first, (Piece(first, pack(hashes), bytes(len(hashes)), pin),), (pin,)) if hashes else Found(first)

    async def fetch(
        self, found: Found, block_ids: Sequence[int], *, timeout_s: float, span: telemetry.Span = NO_SPAN
    ) -> int:
        self.told.append(("fetch", span))
        self.fetched_to.append(list(block_ids))
        self.num_writing += 1
        try:
            await self.may_come.wait()
        finally:
            self.num_writing -= 1
        if self.error is not None:
            raise self.error
        return min(len(block_ids), self.brings)

    def release(self, found: Found) -> None:
        self.num_released += 1

    def streaming_offer(
        self, chain: Chain, first: int, block_ids: Sequence[int], label: Label, span: telemetry.Span = NO_SPAN
    ) -> ScriptedSink:
        self.told.append(("offer", span))
        self.sinks.append(sink := ScriptedSink(first, block_ids, label))
        return sink

    async def drain(self, grace_s: float) -> None:
        self.drained.append(grace_s)
