"""Fetches: blocks that an asker has found, written into its leased blocks over the data plane."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence

import numpy as np

from distserve import telemetry
from distserve.errors import (
    BlocksMissing,
    DeadlineExceeded,
    Draining,
    MalformedMessage,
    Overloaded,
    TransportUnavailable,
)
from distserve.kv.hashing import HASH_BYTES
from distserve.messages import TIERS, FetchedState, FetchReply, FetchRequest, Tier, encode
from distserve.telemetry import NO_SPAN
from distserve.transport.base import Sender, Span, Transfer
from distserve.worker.histogram import Histogram
from distserve.worker.in_use import InUse
from distserve.worker.store.traced import by_tier, of_transfer
from distserve_kvstore.columns import NONE, Entries
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.promotion import Promotion
from distserve_kvstore.tier_state import LATENCY_S

log = logging.getLogger(__name__)

MAX_FETCHES = 256  # at once; more are refused


class Fetches:
    def __init__(
        self,
        holdings: Holdings,
        promotion: Promotion,
        senders: Mapping[str, Sender],
        in_use: InUse,
        node_id: str,
    ) -> None:
        self._holdings = holdings
        self._promotion = promotion
        self._senders = senders
        self._in_use = in_use
        self._node_id = node_id
        self._num = 0
        self._none = asyncio.Event()
        self._none.set()
        self.latency = Histogram(LATENCY_S)
        self.num_failed: Counter[str] = Counter()  # by error code
        self.draining = False

    def __len__(self) -> int:
        return self._num

    async def serve(self, request: FetchRequest, span: telemetry.Span = NO_SPAN) -> FetchReply:
        """Raises BlocksMissing, Overloaded, Draining, DeadlineExceeded, TransportError kinds; the asker then revokes
        its lease. Nothing is written to it after this has returned or raised. span: is told what has been served, and
        what that has waited for; its end is the caller's."""
        started = time.monotonic()
        pins = self._holdings.pins
        entries = NONE
        try:
            if self.draining:
                raise Draining("this store node is going away", retry_after_s=1.0)
            if self._num >= MAX_FETCHES:
                raise Overloaded(
                    f"{self._num} fetches are under way here, the limit is {MAX_FETCHES}", retry_after_s=0.1
                )
            entries = self._entries(request)
            pins.hold(entries)
        finally:
            pins.release(request.asker, request.pin_id)
        self._num += 1
        self._none.clear()
        try:
            tiers = Counter(TIERS[i] for i in self._holdings.fastest(entries).tolist())
            if span.is_recording():
                span.set_attributes(by_tier(tiers))
            num_bytes = await self._within(request, entries, span)
        except Exception as e:
            self.num_failed[getattr(e, "code", "internal_error")] += 1
            raise
        finally:
            pins.unhold(entries)
            self._num -= 1
            if not self._num:
                self._none.set()
        seconds = time.monotonic() - started
        self.latency.observe(seconds)
        return FetchReply(num_bytes=num_bytes, tiers=dict(tiers), seconds=seconds)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; returns when every fetch has ended, or after grace_s."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._none.wait()
        except TimeoutError:
            log.warning("%d fetches did not end in %.1f s", self._num, grace_s)

    def _entries(self, request: FetchRequest) -> Entries:
        num = sum(len(run.hashes) // HASH_BYTES for run in request.runs)
        if num != len(request.region.block_ids) or not num:
            raise MalformedMessage(
                f"{num} blocks are asked for, the region has room for {len(request.region.block_ids)}: must be equal, "
                "and at least 1",
                field="region",
            )
        found = self._holdings.prefixes([run.hashes for run in request.runs])
        present = 0
        for run, entries in zip(request.runs, found, strict=True):
            present += len(entries)
            if len(entries) < len(run.hashes) // HASH_BYTES:
                raise BlocksMissing(f"{present} of {num} blocks are here", num_present=present, tier="")
        return np.concatenate(found)

    async def _within(self, request: FetchRequest, entries: Entries, span: telemetry.Span) -> int:
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._send(request, entries, span)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{len(entries)} blocks could not be sent within {request.timeout_s:g} s", timeout_s=request.timeout_s
            ) from None

    async def _send(self, request: FetchRequest, entries: Entries, span: telemetry.Span) -> int:
        kind = request.region.endpoint.kind
        sender = self._senders.get(kind)
        if sender is None:
            raise TransportUnavailable(f"this store node can't write by {kind}", kind=kind)
        coming = self._promotion.bring(entries.tolist())  # reads begin while the connection is made
        transfer = await sender.open(
            request.region,
            timeout_s=request.timeout_s,
            traffic_class=request.traffic_class,
            peer=request.asker,
        )
        reading_s = 0.0
        try:
            reading_s = await self._write(transfer, entries, coming)
            state = FetchedState(source=self._node_id, num_blocks=len(entries))
            num_bytes = await transfer.commit(encode(state), timeout_s=request.timeout_s)
        except BaseException as e:
            await _ended(transfer.abort(str(e) or type(e).__name__))
            raise
        finally:
            if span.is_recording():
                span.set_attributes(of_transfer(transfer.facts) | {"distserve.kv.read_wait_s": reading_s})
        self._in_use.note(request.asker, kind, "as it asked")
        return num_bytes

    async def _write(self, transfer: Transfer, entries: Entries, coming: Sequence[asyncio.Future[bool]]) -> float:
        """Everything that is in memory at once, the rest as it comes, each block once: the seconds for which it waited
        for that. Raises BlocksMissing."""
        waited_s = 0.0
        numbers = entries.tolist()
        todo = list(range(len(numbers)))
        while todo:
            ready = [i for i in todo if coming[i].done()]
            for i in ready:
                if not coming[i].result():
                    raise self._missing(i, numbers)
            self._queue(transfer, ready, numbers)
            if transfer.failure is not None:
                raise transfer.failure
            served = set(ready)
            todo = [i for i in todo if i not in served]
            if todo:
                since = time.monotonic()
                await asyncio.wait({coming[i] for i in todo}, return_when=asyncio.FIRST_COMPLETED)
                waited_s += time.monotonic() - since
        return waited_s

    def _missing(self, i: int, numbers: Sequence[int]) -> BlocksMissing:
        where: Tier = TIERS[int(self._holdings.fastest(np.asarray([numbers[i]], np.int32))[0])]
        return BlocksMissing(
            f"block {i} of {len(numbers)} can't be had from the {where} tier now", num_present=i, tier=where
        )

    def _queue(self, transfer: Transfer, which: Sequence[int], numbers: Sequence[int]) -> None:
        if which:
            rows = self._holdings.index.dram[np.asarray([numbers[i] for i in which], np.int32)].tolist()
            num_layers = self._holdings.arena.layout.num_layers
            transfer.write((Span(0, num_layers, tuple(rows), tuple(which)),), awaited=True)


async def _ended(abort: Coroutine[None, None, None]) -> None:
    """Also when we are cancelled: the rows are held until nobody reads them any more. An abort has a deadline."""
    ending = asyncio.ensure_future(abort)
    cancelled = False
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
