"""What sequences leave behind, given to the store: when they end, and when they are preempted, to be brought back."""

from collections.abc import Callable

from distserve.engine.sequence import Sequence
from distserve.worker.store.client import StoreClient
from distserve_decode.bringing import Bringing
from distserve_decode.limits import Limits
from distserve_decode.live import Live
from distserve_decode.offer_speed import OfferSpeed
from distserve_decode.record import Record
from distserve_decode.roster import Roster
from distserve_decode.scheduler import Scheduler


class Offering:
    """Belongs to the event loop; the scheduler's Elsewhere. In the background: no wait, no error. While blocks are
    given the store's client has a reference to each."""

    def __init__(
        self,
        client: StoreClient,
        roster: Roster,
        scheduler: Scheduler,
        bringing: Bringing,
        limits: Limits,
        record: Record,
        *,
        on_queued: Callable[[], None],
    ) -> None:
        """on_queued(): the scheduler's queue has one more."""
        self._client = client
        self._roster = roster
        self._scheduler = scheduler
        self._bringing = bringing
        self._limits = limits
        self._record = record
        self._on_queued = on_queued
        self.speed = OfferSpeed(client)
        self.num_given = 0  # preempted sequences of which blocks were given away

    def end(self, live: Live) -> None:
        """It ends: its full blocks that nobody has offered yet, generated ones included, while it still holds them.
        What it says next in the conversation begins with them."""
        self._offer(live, live.sequence.num_named_blocks)

    def give(self, sequence: Sequence, num_now: int) -> None:
        """Where that is faster than to compute them again. (What nobody takes stays in the pool until its place is
        needed.)"""
        live = self._roster.of(sequence)
        stop = min(sequence.num_named_blocks, len(sequence.block_table) - num_now)
        num_blocks = stop - live.num_offered_blocks
        if given := num_blocks > 0 and self._pays(num_blocks, live.num_offered_blocks):
            self._offer(live, stop)
            self.num_given += 1
        self._record.preempted(sequence, given=given)

    def bring(self, sequence: Sequence) -> bool:
        is_brought = self._bringing.start(sequence, "", self._is_back, span=self._record.span_of(sequence))
        if is_brought:
            self._record.brought(sequence)
        return is_brought

    def _is_back(self, sequence: Sequence) -> None:
        self._scheduler.resume(sequence)
        self._on_queued()

    def _pays(self, num_blocks: int, first: int) -> bool:
        """To give so many blocks away, from `first` on, instead of computing them."""
        speeds, size = self._scheduler.speeds, self._limits.block_size
        speed = speeds.prompts.speed if speeds.prompts.speed.known else speeds.steps.speed
        compute_s = speed.prefill_s(num_blocks * size, first * size, self._scheduler.chunk_tokens)
        return 0 < num_blocks * self._limits.block_bytes < self.speed.bytes_per_s * compute_s

    def _offer(self, live: Live, stop: int) -> None:
        """From those on that were offered before."""
        sequence, first = live.sequence, live.num_offered_blocks
        if sequence.chain is not None and first < stop:
            blocks, span = sequence.block_table[first:stop], self._record.span_of(sequence)
            self._client.offer(sequence.chain, first, blocks, live.label, span=span)
            self.speed.began()
