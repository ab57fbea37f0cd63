"""All offers of a worker: full blocks of its pool, given to the nodes that are to keep them, in the background."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from distserve import telemetry
from distserve.bus.base import RegistryEvent
from distserve.errors import KVError
from distserve.kv.block_pool import BlockPool
from distserve.kv.hashing import Chain, pack
from distserve.kv.placement import segment_key, segments
from distserve.messages import ChainRun
from distserve.telemetry import NO_SPAN
from distserve.transport.base import Span
from distserve.worker.store.cutting import within
from distserve.worker.store.ending import STOP_S, all_ended
from distserve.worker.store.offers import Label, Route, SegmentOffer

log = logging.getLogger(__name__)

MAX_AT_ONCE = 4  # of finished sequences; the others wait
MAX_SHARE = 4  # 1/4 of the pool may be held for them, however much is allowed


class LayerSink(Protocol):
    """Takes blocks as they are computed. End it, once, by one of the last two, which are for the loop."""

    def layers_ready(self, span: Span, *, awaited: bool = False) -> None:
        """Any thread: these layers of these blocks are final. Targets are block numbers of the prompt, one after the
        other; others than those that are offered are left out."""

    def finished(self) -> None:
        """Every layer of every block that is offered has been reported."""

    def abandoned(self) -> None:
        """Nothing comes any more: what has come is dropped."""


class Offer:
    """A LayerSink: some blocks of a chain, by segments."""

    def __init__(
        self, hashes: Sequence[bytes], first: int, block_ids: Sequence[int], parts: list[SegmentOffer]
    ) -> None:
        self.ancestors = list(hashes[:first])
        self.block_ids = list(block_ids)
        self.parts = parts
        self._stops = [part.depths.stop for part in parts]  # ascending

    def layers_ready(self, span: Span, *, awaited: bool = False) -> None:
        """Each part gets its blocks of it, and those that have none hear nothing."""
        first, last = span.targets[0], span.targets[-1]
        assert last - first == len(span.targets) - 1, "blocks of a span follow one another"
        for part in islice(self.parts, bisect_right(self._stops, first), None):
            if part.depths.start > last:
                break
            if (cut := within(span, part.depths)) is not None:
                part.layers_ready(cut)

    def finished(self) -> None:
        for part in self.parts:
            part.end(computed=True)

    def abandoned(self) -> None:
        for part in self.parts:
            part.end(computed=False)


class Nowhere:
    """The LayerSink of what nobody takes."""

    def layers_ready(self, span: Span, *, awaited: bool = False) -> None: ...

    def finished(self) -> None: ...

    def abandoned(self) -> None: ...


class Giving:
    """Blocks under offer have one more reference in the pool, which is given back when all segments of the offer are
    through, whatever has become of them."""

    def __init__(self, route: Route, pool: BlockPool, *, max_blocks: int, on_freed: Callable[[], None]) -> None:
        """max_blocks: held at once. on_freed: blocks came back to the pool."""
        self._route = route
        self._pool = pool
        self._max_blocks = min(max_blocks, pool.num_total // MAX_SHARE)
        self._on_freed = on_freed
        self._num_held = 0
        self._under_way: dict[asyncio.Task[None], Offer] = {}
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._stopping = False

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def num_held(self) -> int:
        """Blocks under offer, each counted as often as it is."""
        return self._num_held

    def offer(
        self,
        chain: Chain,
        first: int,
        block_ids: Sequence[int],
        label: Label,
        trace: telemetry.Span = NO_SPAN,
    ) -> None:
        """Blocks [first, first + len(block_ids)) of the chain are in these blocks of the pool, which the caller still
        holds, and final."""
        if (offer := self._taken(chain, first, block_ids, label, trace)) is not None:
            num = len(offer.block_ids)
            span = Span(0, self._route.layout.num_layers, tuple(offer.block_ids), tuple(range(first, first + num)))
            offer.layers_ready(span)
            offer.finished()
            self._start(offer, in_turn=True)

    def streaming(
        self,
        chain: Chain,
        first: int,
        block_ids: Sequence[int],
        label: Label,
        trace: telemetry.Span = NO_SPAN,
    ) -> LayerSink:
        """As offer(), of blocks that are being computed."""
        offer = self._taken(chain, first, block_ids, label, trace)
        if offer is None:
            return Nowhere()
        self._start(offer, in_turn=False)
        return offer

    def on_registry(self, event: RegistryEvent) -> None:
        if event.kind == "gone":
            for offer in self._under_way.values():
                for part in offer.parts:
                    part.node_gone(event.worker_id)

    async def drain(self, timeout_s: float) -> None:
        """Returns when all that is under way has ended, or after timeout_s. Nothing new is taken."""
        self._stopping = True
        if self._under_way:
            await asyncio.wait(set(self._under_way), timeout=timeout_s)

    async def stop(self) -> None:
        """What is under way is given up; returns when none of its blocks is read any more, or after STOP_S."""
        self._stopping = True
        tasks = set(self._under_way)
        for offer in self._under_way.values():
            offer.abandoned()
        for task in tasks:
            task.cancel()
        if left := await all_ended(tasks, timeout_s=STOP_S):
            log.error("%d offers have not ended %g s after they were given up", len(left), STOP_S)

    # ------------------------------------------------------------

    def _taken(
        self, chain: Chain, first: int, block_ids: Sequence[int], label: Label, trace: telemetry.Span
    ) -> Offer | None:
        if first + len(block_ids) > len(chain):
            raise KVError(
                f"blocks [{first}, {first + len(block_ids)}) are offered of a chain of {len(chain)}",
                num_blocks=len(block_ids),
                expected=len(chain) - first,
            )
        if self._stopping or not block_ids or not self._route.nodes.live:
            return None
        ids = list(block_ids[: max(0, self._max_blocks - self._num_held)])
        if over := len(block_ids) - len(ids):
            self._route.counts.num_dropped_blocks["full"] += over
        if not ids:
            return None
        self._pool.acquire(ids)
        self._num_held += len(ids)
        parts = [self._part(chain, depths, label, trace) for depths in segments(first, first + len(ids))]
        return Offer(chain.hashes, first, ids, parts)

    def _part(self, chain: Chain, depths: range, label: Label, trace: telemetry.Span) -> SegmentOffer:
        names = pack(chain.hashes[depths.start : depths.stop])
        run = ChainRun(start=depths.start, hashes=names, parent=chain.parent_of(depths.start))
        return SegmentOffer(self._route, segment_key(chain.hashes, depths.start), run, len(depths), label, trace)

    def _start(self, offer: Offer, *, in_turn: bool) -> None:
        task = asyncio.create_task(self._give(offer, in_turn=in_turn), name="offer")
        self._under_way[task] = offer
        task.add_done_callback(lambda done: self._over(done, offer))

    async def _give(self, offer: Offer, *, in_turn: bool) -> None:
        if not in_turn:  # its layers are to leave while they are computed
            await _run(offer.parts)
            return
        async with self._turns:
            await _run(offer.parts)

    def _over(self, task: asyncio.Task[None], offer: Offer) -> None:
        del self._under_way[task]
        self._num_held -= len(offer.block_ids)
        # With its ancestors, so that the beginning of a chain is not evicted before its end.
        ancestors = self._pool.find(offer.ancestors)
        self._pool.acquire(ancestors)
        self._pool.free([*ancestors, *offer.block_ids])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an offer failed", exc_info=error)
        self._on_freed()


async def _run(parts: Sequence[SegmentOffer]) -> None:
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part.run())
