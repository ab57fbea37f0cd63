"""What others may ask of our pool: which blocks it has, and to have them written to theirs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from distserve import telemetry
from distserve.errors import (
    BlocksMissing,
    DeadlineExceeded,
    Draining,
    MalformedMessage,
    Overloaded,
    TransportUnavailable,
)
from distserve.kv.block_pool import BlockPool
from distserve.kv.hashing import unpack
from distserve.kv.layout import fingerprint, require_same
from distserve.messages import (
    TIERS,
    FetchedState,
    FetchReply,
    FetchRequest,
    KVLayout,
    PrefixReply,
    PrefixRequest,
    encode,
)
from distserve.telemetry import current
from distserve.transport.base import Sender, Span
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.ending import STOP_S, all_ended, ended
from distserve.worker.store.traced import by_tier, of_answer, of_transfer, processing, until_over

log = logging.getLogger(__name__)

MAX_FETCHES = 64  # at once; more are refused
_POOL = bytes([TIERS.index("pool")])


class PoolSource:
    """For the loop that owns the pool. Blocks that are being read have one more reference until the transfer's end.

    What a lookup would pin has just been used, and is no more than that: of what nobody uses it is the last to go. A
    pin that kept room from the worker's own sequences would have them computed again, for the sake of a hint; whoever
    finds BlocksMissing computes.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        senders: Mapping[str, Sender],
        note_in_use: Callable[[str, str, str], None],
        counts: StoreCounts,
        *,
        worker_id: str,
        on_freed: Callable[[], None],
    ) -> None:
        """note_in_use: InUse.note(). on_freed: blocks came back to the pool."""
        self._pool = pool
        self._layout = layout
        self._fingerprint = fingerprint(layout)
        self._senders = senders
        self._note_in_use = note_in_use
        self._counts = counts
        self._worker_id = worker_id
        self._on_freed = on_freed
        self._serving: set[asyncio.Task[int]] = set()
        self._draining = False

    def __len__(self) -> int:
        """Fetches under way."""
        return len(self._serving)

    def lookup(self, request: PrefixRequest) -> PrefixReply:
        with until_over(processing("lookup", current(), self._worker_id)) as span:
            reply = self._found(request)
            if span.is_recording():
                span.set_attributes(of_answer(reply))
            return reply

    def _found(self, request: PrefixRequest) -> PrefixReply:
        if request.layout != self._fingerprint or self._draining:
            return PrefixReply(num_found=[0] * len(request.runs))
        found = [self._pool.find(unpack(run.hashes)) for run in request.runs]
        if request.pin_s > 0:
            for ids in reversed(found):  # the first run is the last to go
                self._pool.acquire(ids)
                self._pool.free(ids)
        return PrefixReply(num_found=[len(ids) for ids in found], tiers=[_POOL * len(ids) for ids in found])

    async def fetch(self, request: FetchRequest) -> FetchReply:
        """Raises BlocksMissing, LayoutMismatch, Overloaded, Draining, DeadlineExceeded, TransportError kinds. Nothing
        is read of the pool, or written to the region, after it has returned or raised."""
        with until_over(processing("fetch", current(), self._worker_id)) as span:
            reply = await self._serve(request, span)
            if span.is_recording():
                span.set_attributes(by_tier(reply.tiers))
            return reply

    async def _serve(self, request: FetchRequest, span: telemetry.Span) -> FetchReply:
        started = time.monotonic()
        ids = self._held(request)
        task = asyncio.create_task(self._send(request, ids, span), name=f"serve {request.asker}")
        self._serving.add(task)
        task.add_done_callback(lambda done: self._over(done, ids))
        try:
            num_bytes = await task  # cancelled with us
        except asyncio.CancelledError:
            if (us := asyncio.current_task()) is not None and us.cancelling():
                await all_ended([task])
                raise
            raise Draining("this worker is going away", retry_after_s=1.0) from None  # stop() has ended it
        self._counts.num_served_blocks += len(ids)
        self._counts.num_served_bytes += num_bytes
        return FetchReply(num_bytes=num_bytes, tiers={"pool": len(ids)}, seconds=time.monotonic() - started)

    async def drain(self, timeout_s: float) -> None:
        """Nothing is found here any more; returns when all fetches have ended, or after timeout_s."""
        self._draining = True
        if self._serving:
            await asyncio.wait(set(self._serving), timeout=timeout_s)

    async def stop(self) -> None:
        """Ends every fetch; returns when nothing of the pool is read any more, or after STOP_S."""
        self._draining = True
        for task in self._serving:
            task.cancel()
        if left := await all_ended(set(self._serving), timeout_s=STOP_S):
            log.error("%d fetches by others have not ended %g s after they were ended", len(left), STOP_S)

    # ------------------------------------------------------------

    def _held(self, request: FetchRequest) -> list[int]:
        """The blocks asked for, each with one more reference."""
        if self._draining:
            raise Draining("this worker is going away", retry_after_s=1.0)
        if len(self._serving) >= MAX_FETCHES:
            raise Overloaded(
                f"{len(self._serving)} fetches are under way here, the limit is {MAX_FETCHES}", retry_after_s=0.1
            )
        require_same(self._layout, request.region.layout)
        names = [name for run in request.runs for name in unpack(run.hashes)]
        if not names or len(names) != len(request.region.block_ids) or len(set(names)) != len(names):
            raise MalformedMessage(
                f"{len(names)} blocks are asked for, the region has room for {len(request.region.block_ids)}: must be "
                "as many, different ones, and at least 1",
                field="region",
            )
        ids = self._pool.find(names)
        if len(ids) < len(names):
            self._counts.num_failed_serves[BlocksMissing.code] += 1
            raise BlocksMissing(f"{len(ids)} of {len(names)} blocks are here", num_present=len(ids), tier="pool")
        self._pool.acquire(ids)
        return ids

    async def _send(self, request: FetchRequest, ids: Sequence[int], span: telemetry.Span) -> int:
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._sent(request, ids, span)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{len(ids)} blocks could not be sent within {request.timeout_s:g} s", timeout_s=request.timeout_s
            ) from None

    async def _sent(self, request: FetchRequest, ids: Sequence[int], span: telemetry.Span) -> int:
        kind = request.region.endpoint.kind
        sender = self._senders.get(kind)
        if sender is None:
            raise TransportUnavailable(f"this worker can't write by {kind}", kind=kind)
        transfer = await sender.open(
            request.region, timeout_s=request.timeout_s, traffic_class=request.traffic_class, peer=request.asker
        )
        try:
            blocks = Span(0, self._layout.num_layers, tuple(ids), tuple(range(len(ids))))
            transfer.write((blocks,), awaited=True)
            state = FetchedState(source=self._worker_id, num_blocks=len(ids))
            num_bytes = await transfer.commit(encode(state), timeout_s=request.timeout_s)
        except BaseException as e:
            await ended(transfer.abort(str(e) or type(e).__name__))
            raise
        finally:
            if span.is_recording():
                span.set_attributes(of_transfer(transfer.facts))
        self._note_in_use(request.asker, kind, "as it asked")
        return num_bytes

    def _over(self, task: asyncio.Task[int], ids: Sequence[int]) -> None:
        self._serving.discard(task)
        self._pool.free(ids)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._counts.num_failed_serves[getattr(error, "code", "internal_error")] += 1
        self._on_freed()
