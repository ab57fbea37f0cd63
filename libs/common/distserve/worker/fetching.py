"""What others hold of a prompt that waits, brought into this worker's own pool before its turn comes."""

import asyncio
import logging
import time
from collections.abc import Callable

from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.telemetry import NO_SPAN, Span
from distserve.worker.prefixes import Prefixes
from distserve.worker.store.client import StoreClient

log = logging.getLogger(__name__)

ENDING_SHARE = 0.1  # of a prompt's time is for the end of its fetch: what failed is fenced, what came is kept
LEAST_SHARE = 0.5  # with less of it left nothing is begun: sources would be blamed for what is not their fault


class Fetching:
    """Belongs to the event loop. What has come is named and left in the pool, where the prompt finds it as it finds
    what was computed here: a prompt that waits holds no blocks. Several that lack the same blocks have them brought
    once.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefixes: Prefixes,
        store: StoreClient,
        *,
        min_blocks: int,
        timeout_s: float,
        num_spoken_for: Callable[[], int],
    ) -> None:
        """min_blocks: fewer are computed rather than brought. timeout_s: for all that a prompt waits. num_spoken_for:
        blocks that prompts whose turn is next are about to need: what is brought is no reason to let them wait
        longer."""
        self._pool = pool
        self._prefixes = prefixes
        self._store = store
        self._min_blocks = min_blocks
        self._timeout_s = timeout_s
        self._num_spoken_for = num_spoken_for
        # By the name of the first block; when it is over, whether it was given up with time left.
        self._under_way: dict[bytes, asyncio.Future[bool]] = {}

    def may_help(self, sequence: Sequence, holder: str) -> bool:
        """It lacks enough blocks to be worth it, and there is somebody to ask: store nodes, or `holder`."""
        wanted = self._prefixes.wanted(sequence)
        return len(wanted) >= self._min_blocks and self._store.may_find(holder) and self._lacks(wanted)

    def _lacks(self, wanted: list[bytes]) -> bool:
        return len(wanted) - len(self._pool.find(wanted)) >= self._min_blocks

    async def bring(self, sequence: Sequence, holder: str, *, span: Span = NO_SPAN) -> None:
        """Returns when all that is to be had is in the pool, or after timeout_s. Others' faults are no error. When it
        has returned, or was cancelled, nobody writes to the pool for it. span: of the sequence's stay, whose trace
        shows who is asked."""
        wanted = self._prefixes.wanted(sequence)
        deadline = time.monotonic() + self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._lacks(wanted):
                    num_own = len(self._pool.find(wanted))
                    other = self._under_way.get(wanted[num_own])
                    if other is None:
                        await self._alone(sequence, wanted, holder, deadline, span)
                        return
                    await asyncio.wait({other})
                    if len(self._pool.find(wanted)) <= num_own and not other.result():
                        return  # nothing came of it
        except TimeoutError:
            log.info("%s is computed: what others hold of it is not here after %g s", sequence.key, self._timeout_s)

    async def _alone(self, sequence: Sequence, wanted: list[bytes], holder: str, deadline: float, span: Span) -> None:
        """Those that lack the same wait for us. If our client leaves, the first of them takes over."""
        own = self._pool.find(wanted)
        name, over = wanted[len(own)], asyncio.get_running_loop().create_future()
        self._under_way[name] = over
        self._pool.acquire(own)  # without them what comes would be of no use
        given_up = False
        try:
            await self._fetch(sequence, wanted, len(own), holder, deadline, span)
        except asyncio.CancelledError:
            given_up = time.monotonic() < deadline
            raise
        finally:
            self._pool.free(own)
            del self._under_way[name]
            over.set_result(given_up)

    async def _fetch(
        self, sequence: Sequence, wanted: list[bytes], first: int, holder: str, deadline: float, span: Span
    ) -> None:
        assert sequence.chain is not None
        stop = min(len(wanted), first + self._room())
        if stop - first < self._min_blocks or deadline - time.monotonic() < LEAST_SHARE * self._timeout_s:
            return
        found = await self._store.lookup(sequence.chain, first, stop=stop, holder=holder, span=span)
        num = min(len(found), self._room())
        left_s = deadline - time.monotonic() - ENDING_SHARE * self._timeout_s
        if num < self._min_blocks or left_s <= 0:
            self._store.release(found)
            return
        block_ids = self._pool.allocate(num)
        try:
            num = await self._store.fetch(found, block_ids, timeout_s=left_s, span=span)
            self._pool.name(block_ids[:num], wanted[first : first + num], sequence.chain.parent_of(first))
        finally:
            self._pool.free(block_ids)

    def _room(self) -> int:
        """Blocks that nobody needs before this prompt does."""
        return max(0, self._pool.num_available - self._num_spoken_for())
