"""What a worker asks of the store, and gives to it."""

from __future__ import annotations

from collections.abc import Sequence

from distserve.kv.hashing import Chain
from distserve.messages import TrafficClass
from distserve.telemetry import NO_SPAN, Span
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.fetches import Fetches
from distserve.worker.store.found import Found
from distserve.worker.store.giving import Giving, LayerSink, Nowhere
from distserve.worker.store.lookups import Lookups
from distserve.worker.store.nodes import Nodes
from distserve.worker.store.offers import Label

UNLABELLED = Label()


class StoreClient:
    """For the loop that owns the BlockPool. Without kvstore.use it finds nothing and takes nothing.

    found = await client.lookup(chain, first, stop=..., holder=...)
    if found:
        ids = pool.allocate(len(found))
        num = await client.fetch(found, ids, timeout_s=...)     # blocks ids[:num] hold chain.hashes[first:first+num]
        pool.name(ids[:num], chain.hashes[first:first + num]); pool.free(ids[num:])

    `span`: whose trace shows what is asked and given (traced.py).
    """

    def __init__(
        self,
        nodes: Nodes,
        lookups: Lookups,
        fetches: Fetches,
        giving: Giving,
        counts: StoreCounts,
        *,
        use: bool,
        min_fetch_blocks: int,
    ) -> None:
        """use and min_fetch_blocks: kvstore.use, kvstore.min_fetch_blocks."""
        self._nodes = nodes
        self._lookups = lookups
        self._fetches = fetches
        self._giving = giving
        self._use = use
        self._min_fetch_blocks = min_fetch_blocks
        self.counts = counts

    @property
    def nodes(self) -> Sequence[str]:
        """Store nodes that are asked and given to, in order of their names."""
        return self._nodes.live

    @property
    def num_offers(self) -> int:
        """Under way."""
        return len(self._giving)

    @property
    def num_held_blocks(self) -> int:
        """References to blocks of the pool that offers hold."""
        return self._giving.num_held

    def may_find(self, holder: str = "") -> bool:
        """Whether there is anybody to ask: a store node, or `holder`, a decode worker."""
        return self._use and bool(self._nodes.live or (holder and self._nodes.worker(holder)))

    async def lookup(
        self, chain: Chain, first: int, *, stop: int | None = None, holder: str = "", span: Span = NO_SPAN
    ) -> Found:
        """Blocks of the chain from number `first` on, up to `stop` (its end if None), unbroken, that store nodes or
        `holder` (a decode worker's id) have: pinned where they are, so fetch() or release() what is found.

        Empty if there are fewer than kvstore.min_fetch_blocks. Takes kvstore.lookup_timeout_s at most: who is silent
        has nothing. Raises nothing but CancelledError; cancelled, it leaves no pin.
        """
        stop = len(chain) if stop is None else min(stop, len(chain))
        if stop - first < self._min_fetch_blocks or not self.may_find(holder):
            return Found(first)
        found = await self._lookups.find(chain.hashes, first, stop, holder, span)
        if len(found) >= self._min_fetch_blocks:
            return found
        self.release(found)
        return Found(first)

    async def fetch(
        self,
        found: Found,
        block_ids: Sequence[int],
        *,
        timeout_s: float,
        traffic_class: TrafficClass = "prefill",
        span: Span = NO_SPAN,
    ) -> int:
        """Have the first len(block_ids) blocks of `found` written into these blocks of our pool, which the caller holds
        and nobody may read meanwhile. Returns how many from the first on have come, verified; the others' content is
        undefined. When it has returned or raised nobody can write to any of them: leases that failed are fenced.

        Gives every pin of `found` back. Raises KVError for more blocks than were found, CancelledError, nothing else;
        cancelled, it leaves no lease and no pin.
        """
        return await self._fetches.fetch(found, block_ids, timeout_s=timeout_s, traffic_class=traffic_class, span=span)

    def release(self, found: Found) -> None:
        """What was found is not wanted: give its pins back. Idempotent, also after fetch()."""
        self._lookups.give_back(found.pins)

    def offer(
        self,
        chain: Chain,
        first: int,
        block_ids: Sequence[int],
        label: Label = UNLABELLED,
        *,
        span: Span = NO_SPAN,
    ) -> None:
        """Give the chain's blocks [first, first + len(block_ids)), which are final and in these blocks of our pool, to
        the nodes that are to keep them, in the background. The caller holds the blocks when it calls; while they are
        read the client holds a reference of its own. What is over kvstore.offer_blocks is dropped, from the end, and
        counted, as is what a node refuses. No wait, no error.
        """
        if self._use:
            self._giving.offer(chain, first, block_ids, label, span)

    def streaming_offer(
        self,
        chain: Chain,
        first: int,
        block_ids: Sequence[int],
        label: Label = UNLABELLED,
        *,
        span: Span = NO_SPAN,
    ) -> LayerSink:
        """As offer(), of full blocks that are about to be computed: their layers leave as they are reported to the
        sink, and the store keeps them from when it is told finished(). Open it when the first pass begins: a node
        waits kvstore.lease_ttl_s for the next layer. What is reported of other blocks, e.g. the last partial one, is
        left out."""
        if not self._use:
            return Nowhere()
        return self._giving.streaming(chain, first, block_ids, label, span)

    async def drain(self, grace_s: float) -> None:
        """Nothing new is offered; returns when all offers under way have ended, or after grace_s."""
        await self._giving.drain(grace_s)

    async def stop(self) -> None:
        """Gives up what is under way; returns when nothing of the pool is read any more."""
        await self._giving.stop()
        await self._lookups.stop()
