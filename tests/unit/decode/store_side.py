"""The store that prefill's tests script, which takes what decode offers, too."""

from collections.abc import Sequence
from dataclasses import dataclass

from distserve.kv.block_pool import BlockPool
from distserve.kv.hashing import Chain
from distserve.telemetry import NO_SPAN, Span
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.offers import Label
from tests.unit.prefill import store_side


@dataclass(frozen=True, slots=True)
class Offered:
    hashes: list[bytes]
    block_ids: list[int]
    label: Label


class ScriptedStore(store_side.ScriptedStore):
    """What it is offered it takes at once, or, where a test says so, holds until it is told that it may."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        self._pool = pool
        self.offers: list[Offered] = []
        self.counts = StoreCounts()
        self.holds = False
        self.held: list[list[int]] = []

    @property
    def idle(self) -> bool:  # type: ignore[override]
        return not self.held

    @property
    def num_offers(self) -> int:
        return len(self.held)

    def offer(self, chain: Chain, first: int, block_ids: Sequence[int], label: Label, *, span: Span = NO_SPAN) -> None:
        self._pool.acquire(block_ids)  # as it does while it reads them: they must be used still
        self.held.append(list(block_ids))
        if not self.holds:
            self.let_go()
        self.offers.append(Offered(chain.hashes[first : first + len(block_ids)], list(block_ids), label))

    def let_go(self, num_bytes: int = 0) -> None:
        """Of what it was offered first: it got there, or failed."""
        self.counts.num_offered_bytes += num_bytes
        self._pool.free(self.held.pop(0))
