"""The decode worker: adopts sequences whose KV has come, and steps all of them, one token each a pass.

The event loop owns scheduler, pool, reservations and sequences; the engine's thread runs one pass at a time. The loop
turns a pass's outcome into the next pass at once; what it yielded is sent while that one runs, or before the loop
sleeps. Every way out of a sequence (finished, cancelled, deadline, error) ends in `_release`, once.
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass

from distserve.bus.base import RegistryEvent
from distserve.engine.batching import Batch, Sampled
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.engine.stopping import finish_reason
from distserve.errors import (
    AlreadyAdopted,
    Cancelled,
    DeadlineExceeded,
    DistServeError,
    Draining,
    InvalidRequest,
)
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
    TokenLogprob,
    WorkerStatus,
    decode_as,
    num_blocks_for,
)
from distserve.transport.base import Commit
from distserve.worker.admission import check_prompt, check_queue
from distserve.worker.engine_thread import EngineThread
from distserve.worker.outbox import Outbox
from distserve_decode.adoption import arrived
from distserve_decode.live import Live
from distserve_decode.reservations import Reservation, Reservations
from distserve_decode.scheduler import Scheduler
from distserve_decode.tombstones import Tombstones

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_waiting: int
    block_size: int
    colocated: bool


class DecodeWorker:
    def __init__(
        self,
        *,
        runner: ModelRunner,
        engine: EngineThread,
        pool: BlockPool,
        scheduler: Scheduler,
        outbox: Outbox,
        limits: Limits,
    ) -> None:
        self.status: WorkerStatus = "warming"
        self.reservations: Reservations | None = None  # set by main; None: nothing is handed over here (colocated)
        self._runner = runner
        self._engine = engine
        self._pool = pool
        self._scheduler = scheduler
        self._outbox = outbox
        self._limits = limits
        self._live: dict[SequenceKey, Live] = {}
        self._by_sequence: dict[Sequence, Live] = {}
        self._undrawn: list[Live] = []  # adopted, token 0 still to be drawn
        self._in_pass: set[Sequence] = set()
        self._tombstones = Tombstones()
        self._wake = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._tokens_per_s = 0.0

    # ------------------------------------------------------------ what the bus brings

    def may_grant(self) -> bool:
        """Room for one more sequence, and none that was preempted waits for blocks."""
        reserved = self.reservations.num_granted if self.reservations else 0
        return not self._scheduler.waiting and len(self._live) + reserved < self._scheduler.max_num_seqs

    async def lease(self, request: LeaseRequest) -> LeaseGrant:
        if self.reservations is None:
            raise InvalidRequest("this decode worker is colocated: it takes no hand-overs", param="decode_worker")
        if request.key in self._tombstones:
            raise Cancelled(f"{request.key} was cancelled")
        if request.key in self._live or request.key in self._outbox:
            raise AlreadyAdopted(f"{request.key} is here already", worker=self._outbox.worker_id)
        return await self.reservations.grant(request)

    def release_lease(self, release: LeaseRelease) -> None:
        if self.reservations is None:
            return
        if release.lease_id:
            self.reservations.release(release.lease_id, release.epoch, release.reason)
        else:
            self.reservations.cancel(release.key)

    def submit(self, request: SubmitRequest) -> SubmitReply:
        """Compute it here from the start (colocated)."""
        num_waiting = len(self._scheduler.waiting)
        if request.key in self._live:
            return SubmitReply(num_waiting=num_waiting)
        if self.status == "draining":
            raise Draining("this decode worker is going away", retry_after_s=1.0)
        if not self._limits.colocated:
            raise InvalidRequest(
                "this decode worker takes hand-overs only; set decode.colocated", param="decode_worker"
            )
        check_queue(num_waiting, self._limits.max_waiting)
        check_prompt(request, self._limits.max_model_len)
        sequence = Sequence(request.key, list(request.token_ids), request.num_prompt_tokens, request.sampling)
        deadline = math.inf if request.deadline_s is None else time.monotonic() + request.deadline_s
        self._open(Live(sequence, request.gateway, deadline))
        self._scheduler.submit(sequence)
        self._wake.set()
        return SubmitReply(num_waiting=num_waiting + 1)

    def _open(self, live: Live) -> None:
        sequence = live.sequence
        self._runner.sampler.validate(sequence.sampling)
        largest = min(self._limits.max_model_len, sequence.num_prompt_tokens + sequence.sampling.max_tokens)
        if num_blocks_for(largest, self._limits.block_size) > self._pool.num_total:
            raise InvalidRequest(
                f"prompt and max_tokens make {largest} tokens, the {self._pool.num_total} KV blocks here hold "
                f"{self._pool.num_total * self._limits.block_size}: raise kv.num_blocks or lower max_tokens",
                param="max_tokens",
            )
        self._live[live.key] = self._by_sequence[sequence] = live
        self._outbox.open(
            live.key,
            live.gateway,
            first=sequence.num_output_tokens,
            with_logprobs=sequence.sampling.logprobs is not None,
        )
        self._emptied.clear()

    def status_of(self, key: SequenceKey, position: int) -> SequenceStatus:
        if key in self._live:
            waits = self._scheduler.waiting and self._live[key].sequence in self._scheduler.waiting
            return SequenceStatus(key, "queued" if waits else "decode", self._outbox.since(key, position))
        if self.reservations is not None and key in self.reservations:
            return SequenceStatus(key, "handoff", None)
        phase: Phase = "finished" if self._outbox.is_finished(key) else "unknown"
        return SequenceStatus(key, phase, self._outbox.since(key, position))

    def cancel(self, key: SequenceKey, error: DistServeError | None = None) -> None:
        """Let go of it at whatever stage it is, also if it is yet to come. With an error its gateway is told."""
        if error is None:
            self._outbox.drop((key,))
        else:
            self._outbox.finish(key, "error", error=error)
        self._tombstones.add(key)
        if self.reservations is not None:
            self.reservations.cancel(key, error)
        live = self._live.get(key)
        if live is None or live.cancelled:
            return
        live.cancelled = True
        if live.sequence not in self._in_pass:  # a pass can't be stopped; the loop releases after it
            self._release(live)

    def on_registry(self, event: RegistryEvent) -> None:
        if event.kind != "gone":
            return
        for live in list(self._live.values()):
            if live.gateway == event.worker_id:
                self.cancel(live.key)
        if self.reservations is not None:
            self.reservations.worker_gone(event.worker_id)

    def load(self) -> Load:
        return Load(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + (self.reservations.num_waiting if self.reservations else 0),
            num_waiting_tokens=self._scheduler.num_waiting_tokens,
            free_blocks=self._pool.num_free,
            total_blocks=self._pool.num_total,
            tokens_per_s=self._tokens_per_s,
        )

    # ------------------------------------------------------------ what the data plane brings

    def on_commit(self, commit: Commit) -> None:
        """A lease's blocks are all here and right: their sequence is ours from now on. An error goes back to the
        prefill worker, which keeps the sequence."""
        assert self.reservations is not None
        state = decode_as(SequenceState, commit.state)
        reservation = self.reservations.commit(commit)
        try:
            self._adopt(state, reservation, commit)
        except BaseException:
            self._pool.free(reservation.blocks)
            self._wake.set()
            self.reservations.room_changed()
            raise

    def _adopt(self, state: SequenceState, reservation: Reservation, commit: Commit) -> None:
        if state.key in self._tombstones:
            raise Cancelled(f"{state.key} was cancelled")
        if state.key in self._live:
            raise InvalidRequest(f"{state.key} is running here already", param="key")
        live = arrived(state, reservation, commit, self._limits.block_size)
        self._open(live)
        live.sequence.block_table = reservation.blocks
        arrival = live.arrival
        assert arrival is not None
        if arrival.token_id is None:
            self._undrawn.append(live)
        else:  # the gateway gets it from both sides, whichever is first
            self._note_token(live, arrival.token_id, arrival.logprob)
            self._scheduler.adopt(live.sequence)
        self._wake.set()

    def on_lost(self, lease_id: int, epoch: int, error: Exception) -> None:
        assert self.reservations is not None
        self.reservations.lost(lease_id, epoch, error)

    def on_freed(self) -> None:
        """A lease's blocks are back: a sequence that waits for blocks may go on."""
        self._wake.set()

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Until cancelled. Cancel it only when drained: a pass in progress is waited for."""
        while True:
            if self._undrawn:
                await self._draw_first_tokens()
            batch = self._scheduler.next_batch()
            if batch.work:
                await self._run_pass(batch)
                continue
            self._room_changed()
            self._wake.clear()
            await self._outbox.flush()
            await self._wake.wait()

    async def _run_pass(self, batch: Batch) -> None:
        """One pass, and beside it what the last one left to do: its tokens leave while this one computes."""
        started = time.monotonic()
        for work in batch.work:
            if work.start == 0:
                self._by_sequence[work.sequence].note_start(started)
        self._in_pass = {w.sequence for w in batch.work}
        running, begun = self._begin(batch)
        self._room_changed()
        await begun.wait()
        await self._outbox.flush()
        try:
            sampled = await running
        except Exception as e:
            log.exception("a pass over %d sequences failed", len(batch.work))
            self._in_pass = set()
            for work in batch.work:
                error = DistServeError(f"decode failed: {type(e).__name__}: {e}")
                self._end_with_error(self._by_sequence[work.sequence], error)
            return
        self._in_pass = set()
        lasted = time.monotonic() - started
        self._scheduler.note_pass(batch, lasted)
        self._tokens_per_s = batch.num_tokens / max(1e-6, lasted)
        for work in batch.work:
            work.sequence.num_computed_tokens += work.num_tokens
        for result in sampled:
            self._take_token(self._by_sequence[result.sequence], result)
        for work in batch.work:  # cancelled in mid-pass without a token
            left = self._by_sequence.get(work.sequence)
            if left is not None and left.cancelled:
                self._release(left)

    def _begin(self, batch: Batch) -> tuple[asyncio.Future[list[Sampled]], asyncio.Event]:
        """The pass, and when it is past what needs Python, in which the loop would be in its way (or has ended)."""
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def tell() -> None:
            loop.call_soon_threadsafe(begun.set)

        running = self._engine.start(self._runner.execute, batch, on_begun=tell)
        running.add_done_callback(lambda _: begun.set())
        return running, begun

    async def _draw_first_tokens(self) -> None:
        """decode.sample_first_token: from the last hidden state, as prefill would have drawn it."""
        undrawn, self._undrawn = self._undrawn, []
        self._in_pass = {live.sequence for live in undrawn}
        for live in undrawn:
            assert live.arrival is not None
            hidden, dtype = live.arrival.hidden, live.arrival.hidden_dtype
            try:
                result = await self._engine.run(self._runner.sample_from_hidden, live.sequence, hidden, dtype)
            except Exception as e:
                log.exception("drawing the first token of %s", live.key)
                self._in_pass.discard(live.sequence)
                self._end_with_error(live, DistServeError(f"decode failed: {type(e).__name__}: {e}"))
                continue
            self._in_pass.discard(live.sequence)
            if not live.cancelled:
                self._scheduler.adopt(live.sequence)
            self._take_token(live, result)

    def _take_token(self, live: Live, sampled: Sampled) -> None:
        if live.cancelled:
            self._release(live)
            return
        if sampled.token_id < 0:
            self._end_with_error(live, DistServeError("the model gave no number for the next token (NaN logits)"))
            return
        live.first_token_at = live.first_token_at or time.monotonic()
        end = finish_reason(live.sequence, sampled.token_id, self._limits.eos_token_ids, self._limits.max_model_len)
        self._note_token(live, sampled.token_id, sampled.logprob, sampled.prompt_logprobs)
        if end is not None:
            self._outbox.finish(live.key, end, timings=live.final_timings())
            self._release(live)

    def _note_token(
        self,
        live: Live,
        token_id: int,
        logprob: TokenLogprob | None,
        prompt_logprobs: list[TokenLogprob] | None = None,
    ) -> None:
        """It is the sequence's next token, on its way to the gateway. With the first goes what came by hand-over."""
        arrival, live.arrival = live.arrival, None
        live.sequence.token_ids.append(token_id)
        self._outbox.append(
            live.key,
            token_id,
            logprob,
            prompt_logprobs=arrival.prompt_logprobs if arrival else prompt_logprobs,
            num_cached_tokens=arrival.num_cached_tokens if arrival else 0,
        )

    # ------------------------------------------------------------ the ends

    def _end_with_error(self, live: Live, error: DistServeError) -> None:
        self._outbox.finish(live.key, "error", error=error)
        self._release(live)

    def _release(self, live: Live) -> None:
        self._scheduler.remove(live.sequence)
        del self._live[live.key]
        del self._by_sequence[live.sequence]
        if live in self._undrawn:
            self._undrawn.remove(live)
        self._room_changed()
        if not self._live:
            self._emptied.set()
            self.check()
        self._wake.set()

    def _room_changed(self) -> None:
        """Leases that wait may be granted: blocks are back, or what was preempted was taken up again."""
        if self.reservations is not None:
            self.reservations.room_changed()

    def check(self) -> None:
        """With no sequence and no lease, every block is free."""
        self._pool.check()
        if not self._live and (self.reservations is None or not len(self.reservations)):
            assert self._pool.num_free == self._pool.num_total, (
                f"{self._pool.num_total - self._pool.num_free} KV blocks belong to nobody"
            )

    async def reap(self, every_s: float = 0.25) -> None:
        """Deadlines, silent leases, outputs that no gateway acknowledged. Until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            now = time.monotonic()
            for live in list(self._live.values()):
                if now >= live.deadline:
                    self.cancel(live.key, DeadlineExceeded("the request's deadline passed on the decode worker"))
            if self.reservations is not None:
                self.reservations.expire()
            self._outbox.forget_old()
            await self._outbox.flush()

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; wait for hand-overs on their way and for what runs; end the rest with an error."""
        self.status = "draining"
        ends_at = time.monotonic() + grace_s
        if self.reservations is not None:
            await self.reservations.drain(grace_s)
        try:
            async with asyncio.timeout(max(0.0, ends_at - time.monotonic())):
                await self._emptied.wait()
        except TimeoutError:
            for key in list(self._live):
                self.cancel(key, Draining("this decode worker went away", retry_after_s=1.0))
            await asyncio.wait({asyncio.ensure_future(self._emptied.wait())}, timeout=5.0)
        if self.reservations is not None:
            await self.reservations.close()
        await self._outbox.flush()
