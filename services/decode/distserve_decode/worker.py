"""The decode worker: adopts sequences whose KV has come, and steps all of them, one token each a pass.

The event loop owns scheduler, pool, reservations and sequences; the engine's thread runs one pass at a time. The loop
turns a pass's outcome into the next pass at once; what it yielded is sent while that one runs, or before the loop
sleeps. Every way out of a sequence (finished, cancelled, deadline, error) ends in `_release`, once; what is computed of
it is named by then, so that it stays in the pool, and goes to the store.
"""

import asyncio
import logging
import time

from distserve.bus.base import RegistryEvent
from distserve.engine.batching import Batch, Sampled
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.errors import AlreadyAdopted, Cancelled, DeadlineExceeded, DistServeError, Draining, InvalidRequest
from distserve.kv.block_pool import BlockPool
from distserve.messages import (
    LeaseGrant,
    LeaseRelease,
    LeaseRequest,
    Load,
    Phase,
    SequenceKey,
    SequenceState,
    SequenceStatus,
    SubmitReply,
    SubmitRequest,
    WorkerStatus,
    decode_as,
)
from distserve.telemetry import Span, current
from distserve.transport.base import Commit
from distserve.worker.engine_thread import EngineThread
from distserve.worker.fetching import Fetching
from distserve.worker.outbox import Outbox
from distserve.worker.prefixes import Prefixes
from distserve.worker.store.opening import Store
from distserve.worker.store.traced import until_over
from distserve_decode.adoption import arrived
from distserve_decode.bringing import Bringing
from distserve_decode.limits import Limits
from distserve_decode.live import Live, submitted
from distserve_decode.load import load_of
from distserve_decode.offering import Offering
from distserve_decode.own_prompts import OwnPrompts
from distserve_decode.passes import Passes
from distserve_decode.prospects import Prospects
from distserve_decode.record import Record
from distserve_decode.reservation import Reservation
from distserve_decode.reservations import Reservations
from distserve_decode.room import Bound
from distserve_decode.roster import Roster
from distserve_decode.scheduler import Scheduler
from distserve_decode.tokens import Tokens
from distserve_decode.tombstones import Tombstones

log = logging.getLogger(__name__)


class DecodeWorker:
    def __init__(
        self,
        *,
        runner: ModelRunner,
        engine: EngineThread,
        pool: BlockPool,
        scheduler: Scheduler,
        prefixes: Prefixes,
        fetching: Fetching,
        store: Store,
        reservations: Reservations,
        outbox: Outbox,
        limits: Limits,
        record: Record,
    ) -> None:
        self.status: WorkerStatus = "warming"
        self._passes = Passes(engine, runner)
        self._validate = runner.sampler.validate
        self._pool = pool
        self.scheduler = scheduler
        self.prefixes = prefixes
        self._store = store
        self._reservations = reservations
        self._outbox = outbox
        self._tokens = Tokens(outbox, limits)
        self._record = record
        self._limits = limits
        self._live = Roster()
        self._undrawn: list[Live] = []  # adopted, token 0 still to be drawn
        self._bringing = Bringing(fetching, on_ended=self.on_freed)
        self._prospects = Prospects(scheduler, prefixes)
        self._own = OwnPrompts(
            scheduler,
            prefixes,
            self._bringing,
            self._prospects,
            limits,
            may_start=self._may_start_own,
            on_queued=self.on_freed,
        )
        self.offering = Offering(
            store.client, self._live, scheduler, self._bringing, limits, record, on_queued=self.on_freed
        )
        scheduler.elsewhere = self.offering
        scheduler.room.bound = self._bound
        self._in_pass: set[Sequence] = set()
        self._tombstones = Tombstones()
        self._wake = asyncio.Event()
        self._tokens_per_s = 0.0

    # ------------------------------------------------------------ what the bus brings

    def may_grant(self) -> bool:
        """There is a seat for one more sequence."""
        return self.scheduler.room.num_seats > 0

    def _may_start_own(self) -> bool:
        return self.may_grant() and not self.scheduler.waiting and not self._reservations.num_waiting

    def _bound(self) -> Bound:
        return Bound(self._reservations.num_granted + len(self._undrawn), self._reservations.num_growth_blocks)

    async def lease(self, request: LeaseRequest) -> LeaseGrant:
        with until_over(self._record.asked(request.key, current())):
            if request.key in self._tombstones:
                raise Cancelled(f"{request.key} was cancelled")
            if request.key in self._live or request.key in self._outbox:
                raise AlreadyAdopted(f"{request.key} is here already", worker=self._outbox.worker_id)
            return await self._reservations.grant(request)

    def release_lease(self, release: LeaseRelease) -> None:
        if release.lease_id:
            self._reservations.release(release.lease_id, release.epoch, release.reason)
        else:
            self._reservations.cancel(release.key)

    def submit(self, request: SubmitRequest) -> SubmitReply:
        """Compute it here from the start, if it is one of those that this worker does (own_prompts.py). A key that is
        already here is accepted again without effect."""
        if request.key in self._live:
            return SubmitReply(num_waiting=self.scheduler.num_waiting)
        if self.status == "draining":
            raise Draining("this decode worker is going away", retry_after_s=1.0)
        with self._record.coming(request.key, request.slo, current()) as span:
            sequence, ttft_s = self._own.take(request, self._check, span)
            self._open(submitted(request, sequence), span)
        return SubmitReply(num_waiting=self.scheduler.num_waiting, ttft_s=ttft_s)

    def _check(self, sequence: Sequence) -> None:
        """Raises InvalidRequest for one that can't be served here."""
        self._validate(sequence.sampling)
        self._limits.check_fits(sequence, self._pool.num_total)

    def _open(self, live: Live, span: Span) -> None:
        self._live.add(live)
        self._record.came(live, span)
        self._tokens.open(live)

    def status_of(self, key: SequenceKey, position: int) -> SequenceStatus:
        if (live := self._live.get(key)) is not None:
            phase: Phase = "decode" if live.sequence.block_table else "queued"
            return SequenceStatus(key, phase, self._outbox.since(key, position))
        if key in self._reservations:
            return SequenceStatus(key, "handoff", None)
        phase = "finished" if self._outbox.is_finished(key) else "unknown"
        return SequenceStatus(key, phase, self._outbox.since(key, position))

    def cancel(self, key: SequenceKey, error: DistServeError | None = None) -> None:
        """Let go of it at whatever stage it is, also if it is yet to come. With an error its gateway is told."""
        if error is None:
            self._outbox.drop((key,))
        else:
            self._outbox.finish(key, "error", error=error)
        self._tombstones.add(key)
        self._reservations.cancel(key, error)
        live = self._live.get(key)
        if live is None or live.cancelled:
            return
        live.cancelled, live.error = True, error
        if live.sequence not in self._in_pass:  # a pass can't be stopped; the loop releases after it
            self._release(live)

    def on_registry(self, event: RegistryEvent) -> None:
        if event.kind != "gone":
            return
        for live in self._live:
            if live.gateway == event.worker_id:
                self.cancel(live.key)
        self._reservations.worker_gone(event.worker_id)

    def load(self) -> Load:
        return load_of(
            self.scheduler,
            self._prospects,
            self._pool,
            num_leases=self._reservations.num_waiting,
            tokens_per_s=self._tokens_per_s,
        )

    # ------------------------------------------------------------ what the data plane brings

    def on_commit(self, commit: Commit) -> None:
        """A lease's blocks are all here and right: their sequence is ours from now on. An error goes back to the
        prefill worker, which keeps the sequence."""
        state = decode_as(SequenceState, commit.state)
        reservation = self._reservations.commit(commit)
        try:
            with self._record.coming(state.key, state.slo, reservation.asker) as span:
                self._adopt(state, reservation, commit, span)
        except BaseException:
            self._pool.free(reservation.blocks)
            self._wake.set()
            self._reservations.room_changed()
            raise

    def _adopt(self, state: SequenceState, reservation: Reservation, commit: Commit, span: Span) -> None:
        if state.key in self._tombstones:
            raise Cancelled(f"{state.key} was cancelled")
        if state.key in self._live:
            raise InvalidRequest(f"{state.key} is running here already", param="key")
        live = arrived(state, self.prefixes.chain_of(state), reservation, commit, self._limits.block_size)
        self._check(live.sequence)
        live.sequence.block_table = reservation.blocks
        self.prefixes.name(live.sequence)
        self._open(live, span)
        arrival = live.arrival
        assert arrival is not None
        if arrival.token_id is None:
            self._undrawn.append(live)
        else:  # the gateway gets it from both sides, whichever is first
            self._tokens.note(live, arrival.token_id, arrival.logprob)
            self.scheduler.adopt(live.sequence, live.slo)
        self._wake.set()

    def on_lost(self, lease_id: int, epoch: int, error: Exception) -> None:
        self._record.fault(error)
        self._reservations.lost(lease_id, epoch, error)

    def on_freed(self) -> None:
        """Blocks are back, of a lease or lent to the store, or a sequence has come: what waits may go on."""
        self.offering.speed.look()
        self._wake.set()

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Until cancelled. Cancel it only when drained: a pass in progress is waited for."""
        while True:
            if self._undrawn:
                await self._draw_first_tokens()
            batch = self.scheduler.next_batch()
            if batch.work:
                await self._run_pass(batch)
                continue
            self._wake.clear()
            self._reservations.room_changed()
            await self._outbox.flush()
            await self._record.untold.tell(self._wake.is_set)
            await self._wake.wait()

    async def _run_pass(self, batch: Batch) -> None:
        """One pass, and beside it what the last one left to do: its tokens leave while this one computes."""
        started = time.monotonic()
        for work in batch.work:
            self._live.of(work.sequence).note_pass(started)
        self._in_pass = {w.sequence for w in batch.work}
        running, begun = self._passes.begin(batch)
        self._reservations.room_changed()
        await begun.wait()
        await self._outbox.flush()
        flushed = time.monotonic()
        if self._record.untold:
            await self._record.untold.tell(running.done)
        try:
            sampled, ended = await running
        except Exception as e:
            log.exception("a pass over %d sequences failed", len(batch.work))
            self._in_pass = set()
            for work in batch.work:
                error = DistServeError(f"decode failed: {type(e).__name__}: {e}")
                self._end_with_error(self._live.of(work.sequence), error)
            return
        self._in_pass = set()
        ended, num_tokens = max(ended, flushed), batch.num_tokens  # what was told of others is no part of it
        lasted = ended - started
        self.scheduler.note_pass(batch, lasted)
        self._tokens_per_s = num_tokens / max(1e-6, lasted)
        self._record.passed(batch, num_tokens, started, ended)
        no_numbers = {r.sequence for r in sampled if r.token_id < 0}
        for work in batch.work:
            work.sequence.num_computed_tokens += work.num_tokens
            if work.sequence not in no_numbers:
                self.prefixes.name(work.sequence)
        for result in sampled:
            self._take_token(self._live.of(result.sequence), result)
        for work in batch.work:  # cancelled in mid-pass without a token
            left = self._live.find(work.sequence)
            if left is not None and left.cancelled:
                self._release(left)

    async def _draw_first_tokens(self) -> None:
        """Of those that were adopted without."""
        while self._undrawn:
            live = self._undrawn[0]  # it has its seat by being there until it runs
            self._in_pass = {live.sequence}
            try:
                result = await self._passes.first_token(live)
            except Exception as e:
                log.exception("drawing the first token of %s", live.key)
                self._in_pass = set()
                self._end_with_error(live, DistServeError(f"decode failed: {type(e).__name__}: {e}"))
                continue
            self._in_pass = set()
            if not live.cancelled:
                self._record.drew(result)
                self._undrawn.remove(live)
                self.scheduler.adopt(live.sequence, live.slo)
            self._take_token(live, result)

    def _take_token(self, live: Live, sampled: Sampled) -> None:
        if live.cancelled:
            self._release(live)
            return
        if sampled.token_id < 0:
            self.prefixes.forget(live.sequence)
            self._end_with_error(live, DistServeError("the model gave no number for the next token (NaN logits)"))
            return
        if self._tokens.take(live, sampled):
            self._release(live)

    def _end_with_error(self, live: Live, error: DistServeError) -> None:
        live.error = live.error or error
        self._outbox.finish(live.key, "error", error=error)
        self._release(live)

    def _release(self, live: Live) -> None:
        self.offering.end(live)
        self._record.left(live)
        if live.sequence.num_output_tokens:
            self.scheduler.lengths.note(live.sequence.num_output_tokens)
        self._own.remove(live.sequence)
        self._live.remove(live)
        if live in self._undrawn:
            self._undrawn.remove(live)
        self._reservations.room_changed()
        if not self._live:
            self._check_owners()
        self._wake.set()

    def check(self) -> None:
        """The pool's whole books, which takes milliseconds for a large one, and who owns what."""
        self._pool.check()
        self._check_owners()

    def _check_owners(self) -> None:
        """With no sequence and no lease, every block is free or cached, but for those that the store's client holds."""
        if not (self._live or len(self._reservations) or self._bringing.sequences) and self._store.idle:
            assert not self._pool.num_used, f"{self._pool.num_used} KV blocks belong to nobody"

    async def reap(self, every_s: float = 0.25) -> None:
        """Deadlines, silent leases, outputs that no gateway acknowledged. Until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            now = time.monotonic()
            for live in self._live:
                if now >= live.deadline:
                    self.cancel(live.key, DeadlineExceeded("the request's deadline passed on the decode worker"))
            self._reservations.expire()
            self.offering.speed.look()
            self._outbox.forget_old()
            await self._outbox.flush()
            await self._record.untold.tell()

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; wait for hand-overs on their way and for what runs; end the rest with an error."""
        self.status = "draining"
        ends_at = time.monotonic() + grace_s
        await self._reservations.drain(grace_s)
        try:
            async with asyncio.timeout(max(0.0, ends_at - time.monotonic())):
                await self._live.emptied()
        except TimeoutError:
            for live in self._live:
                self.cancel(live.key, Draining("this decode worker went away", retry_after_s=1.0))
            await asyncio.wait({asyncio.ensure_future(self._live.emptied())}, timeout=5.0)
        await self._reservations.close()
        await self._outbox.flush()
        self._record.untold.tell_all()
        await self._store.drain(max(0.0, ends_at - time.monotonic()))
