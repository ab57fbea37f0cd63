"""The store that prefill's tests script, which takes what decode offers, too."""

from collections.abc import Sequence
from dataclasses import dataclass

from distserve.kv.block_pool import BlockPool
from distserve.kv.hashing import Chain
from distserve.worker.store.offers import Label
from tests.unit.prefill import store_side


@dataclass(frozen=True, slots=True)
class Offered:
    hashes: list[bytes]
    block_ids: list[int]
    label: Label


class ScriptedStore(store_side.ScriptedStore):
    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        self._pool = pool
        self.offers: list[Offered] = []

    def offer(self, chain: Chain, first: int, block_ids: Sequence[int], label: Label) -> None:
        self._pool.acquire(block_ids)  # as it does while it reads them: they must be used still
        self._pool.free(block_ids)
        self.offers.append(Offered(chain.hashes[first : first + len(block_ids)], list(block_ids), label))
