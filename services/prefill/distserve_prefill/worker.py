"""The prefill worker: takes prompts, computes them, hands them over.

The event loop owns scheduler, block pool and jobs; the engine's thread runs one pass at a time. Every way out of a
job (handed over, finished at its first token, cancelled, deadline, error) ends in `_release`, once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from distserve.bus.base import RegistryEvent
from distserve.engine.batching import Batch, Sampled
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.engine.stopping import finish_reason
from distserve.errors import DeadlineExceeded, DistServeError, Draining
from distserve.kv.block_pool import BlockPool
from distserve.messages import KVLayout, Load, SequenceKey, SequenceStatus, SubmitReply, SubmitRequest, WorkerStatus
from distserve.worker.admission import check_queue
from distserve.worker.engine_thread import EngineThread, timed
from distserve.worker.fetching import Fetching
from distserve.worker.outbox import Outbox
from distserve.worker.prefixes import Prefixes
from distserve.worker.store.opening import Store
from distserve_prefill.handing_over import hand_over
from distserve_prefill.handoff import Handoff
from distserve_prefill.intake import Intake
from distserve_prefill.job import Job
from distserve_prefill.limits import Limits
from distserve_prefill.offering import offered
from distserve_prefill.predicting import backlog
from distserve_prefill.recorder import Recorder
from distserve_prefill.scheduler import Scheduler
from distserve_prefill.spans import LayerFeed, prefix_span
from distserve_prefill.waiting import Waiting

log = logging.getLogger(__name__)


class PrefillWorker:
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
        outbox: Outbox,
        recorder: Recorder,
        layout: KVLayout,
        limits: Limits,
        make_handoff: Callable[[Job], Handoff],
    ) -> None:
        self.status: WorkerStatus = "warming"
        self._runner = runner
        self._engine = engine
        self._pool = pool
        self._scheduler = scheduler
        self.prefixes = prefixes
        self._waiting = Waiting(scheduler, fetching)
        self._waiting.on_queued = self.look_again
        self._store = store
        self._outbox = outbox
        self._recorder = recorder
        self._intake = Intake(runner, pool, prefixes, layout, max_model_len=limits.max_model_len)
        self._layout = layout
        self._limits = limits
        self._make_handoff = make_handoff
        self._jobs: dict[SequenceKey, Job] = {}
        self._in_pass: list[Job] = []
        self._wake = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._tokens_per_s = 0.0

    # ------------------------------------------------------------ what the bus brings

    def submit(self, request: SubmitRequest) -> SubmitReply:
        """Queue a sequence. A key that is already here is accepted again without effect (a repeated request). Raises
        SloUnattainable for one that was promised its first token sooner than it would come."""
        if request.key in self._jobs:
            return SubmitReply(num_waiting=len(self._waiting))
        if self.status == "draining":
            raise Draining("this prefill worker is going away", retry_after_s=1.0)
        check_queue(len(self._waiting), self._limits.max_waiting)
        job = self._intake.job(request)
        ttft_s = self._waiting.check(job)
        self._recorder.accepted(job)
        self._jobs[request.key] = job
        self._outbox.open(
            job.key,
            request.gateway,
            first=job.sequence.num_output_tokens,
            with_logprobs=request.sampling.logprobs is not None,
        )
        self._emptied.clear()
        self._waiting.add(job)
        return SubmitReply(num_waiting=len(self._waiting), ttft_s=ttft_s)

    def look_again(self) -> None:
        """There may be more to do: blocks are back, or a prompt has joined the queue."""
        self._wake.set()

    def status_of(self, key: SequenceKey, position: int) -> SequenceStatus:
        job = self._jobs.get(key)
        phase = job.phase if job else "finished" if self._outbox.is_finished(key) else "unknown"
        return SequenceStatus(key, phase, self._outbox.since(key, position))

    def cancel(self, key: SequenceKey, error: DistServeError | None = None) -> None:
        """Let go of it at whatever stage it is. With an error its gateway is told, without it is not."""
        if error is None:
            self._outbox.drop((key,))
        else:
            self._outbox.finish(key, "error", error=error)
        job = self._jobs.get(key)
        if job is None or job.cancelled or job.is_over:
            return
        job.cancelled = True
        job.ends("cancelled" if error is None else "error", error)
        if job.committing is not None:
            job.committing.cancel()  # _hand_over sees it and releases
        elif job.ending is None and job not in self._in_pass:  # a pass can't be stopped; the loop releases after it
            self._end(job, self._release(job))

    def on_registry(self, event: RegistryEvent) -> None:
        """A gateway that is gone wants no answers; a decode worker that is gone gives no leases."""
        if event.kind != "gone":
            return
        for job in list(self._jobs.values()):
            if job.request.gateway == event.worker_id:
                self.cancel(job.key)
            elif job.handoff is not None:
                job.handoff.peer_gone(event.worker_id)

    def load(self) -> Load:
        course = self._waiting.course
        return Load(
            num_running=len(self._jobs) - len(self._waiting),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            free_blocks=self._pool.num_available,
            total_blocks=self._pool.num_total,
            tokens_per_s=self._tokens_per_s,
            speed=course.speed,
            pass_tokens=self._scheduler.pass_tokens,
            backlog=backlog(course),
        )

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Until cancelled. Cancel it only when drained: a pass in progress is waited for."""
        while True:
            batch, jobs = self._scheduler.next_batch()
            if not batch.work:
                self._wake.clear()
                await self._recorder.untold.tell(self._wake.is_set)
                await self._wake.wait()
                continue
            await self._run_pass(batch, jobs)

    async def _run_pass(self, batch: Batch, jobs: list[Job]) -> None:
        began_at = time.monotonic()
        for job in jobs:
            if job.phase == "queued":
                job.phase, job.started_at = "prefill", began_at
                self._begin(job)
        takers = [[taker for taker in (j.handoff, j.offer) if taker is not None] for j in jobs]
        feed = LayerFeed(batch, takers, self._layout, span_bytes=self._limits.span_bytes)
        self._in_pass = jobs
        error: DistServeError | None = None
        sampled: dict[Sequence, Sampled] = {}
        seconds = 0.0
        try:
            running = self._engine.start(timed(self._runner.execute), batch, feed)
            if self._recorder.untold:
                await self._recorder.untold.tell(running.done)
            drawn, seconds = await running
            sampled = {s.sequence: s for s in drawn}
        except Exception as e:
            log.exception("a pass over %d sequences failed", len(jobs))
            error = DistServeError(f"prefill failed: {type(e).__name__}: {e}")
        finally:
            self._in_pass = []
        if error is None:
            self._tokens_per_s = batch.num_tokens / max(1e-6, seconds)
            self._scheduler.note_pass(batch, seconds)
        ended_at = time.monotonic()
        for work, job in zip(batch.work, jobs, strict=True):
            self._scheduler.computed(job, work.num_tokens)
            if error is None and not (work.samples and sampled[job.sequence].token_id < 0):
                self.prefixes.name(job.sequence)
                if work.samples:
                    job.end_offer(computed=True)
            if job.cancelled:
                self._end(job, self._release(job))
            elif error is not None:
                self.cancel(job.key, error)
            elif work.samples:
                self._first_token(job, sampled[job.sequence])
        self._recorder.passed(batch, jobs, (began_at, ended_at), seconds, error)
        await self._outbox.flush()

    def _begin(self, job: Job) -> None:
        """Its first pass is next. Decode is asked for room, and sent its prefix hits as soon as there is some."""
        self.prefixes.note_begun(job.sequence)
        self._recorder.begun(job)
        if job.needs_handoff:
            job.handoff = self._make_handoff(job)
            job.handoff.start()
            if (hits := prefix_span(job.sequence, self._layout)) is not None:
                job.handoff.layers_ready(hits)
        job.offer = offered(self._store.client, job, self._layout.block_size)

    def _first_token(self, job: Job, sampled: Sampled) -> None:
        """The prompt is computed: its first token goes to the gateway at once, the rest to decode."""
        job.sampled_at = time.monotonic()
        if sampled.token_id < 0:
            self.prefixes.forget(job.sequence)
            self.cancel(job.key, DistServeError("the model gave no number for the next token (NaN logits)"))
            return
        self._recorder.sampled(job)
        sequence = job.sequence
        if self._limits.sample_on_decode and job.handoff is not None:
            self._end(job, self._hand_over(job, sampled))
            return
        end = finish_reason(sequence, sampled.token_id, self._limits.eos_token_ids, self._limits.max_model_len)
        sequence.token_ids.append(sampled.token_id)
        self._outbox.append(
            job.key,
            sampled.token_id,
            sampled.logprob,
            prompt_logprobs=sampled.prompt_logprobs,
            num_cached_tokens=sequence.num_cached_tokens,
        )
        if end is not None:
            job.ends("finished")
            self._outbox.finish(job.key, end, timings=job.timings())
            self._end(job, self._release(job))
        else:
            self._end(job, self._hand_over(job, sampled))

    async def _hand_over(self, job: Job, sampled: Sampled) -> None:
        try:
            await hand_over(job, sampled, self._outbox, hidden_dtype=self._limits.hidden_dtype)
        finally:
            await self._release(job)

    # ------------------------------------------------------------ the ends

    def _end(self, job: Job, how: Coroutine[Any, Any, None]) -> None:
        assert job.ending is None, "a job ends once"
        self._waiting.remove(job)  # now, so that no further pass takes it up
        job.ending = asyncio.create_task(how, name=f"end {job.key}")

    async def _release(self, job: Job) -> None:
        """Blocks go back only when no transfer reads them any more. (An offer has references of its own.)"""
        if job.fetching is not None:
            await asyncio.wait({job.fetching})
        job.end_offer(computed=False)
        if job.handoff is not None:
            await job.handoff.abort("released")
        self._pool.free(job.sequence.block_table)
        job.sequence.block_table = []
        job.phase = "finished"
        self._recorder.ended(job)
        del self._jobs[job.key]
        self._wake.set()
        if not self._jobs:
            self._emptied.set()
            self._check_owners()
        await self._outbox.flush()

    def check(self) -> None:
        """The pool's whole books, which takes milliseconds for a large one, and who owns what."""
        self._pool.check()
        self._check_owners()

    def _check_owners(self) -> None:
        """With no job, every block is free or cached, but for those that the store's client holds."""
        if not self._jobs and self._store.idle:
            assert not self._pool.num_used, f"{self._pool.num_used} KV blocks belong to nobody"

    async def reap(self, every_s: float = 0.25) -> None:
        """Deadlines and outputs that no gateway acknowledged. Until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            now = time.monotonic()
            for job in list(self._jobs.values()):
                if now >= job.deadline:
                    self.cancel(job.key, DeadlineExceeded("the request's deadline passed on the prefill worker"))
            self._outbox.forget_old()
            await self._outbox.flush()
            await self._recorder.untold.tell()

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; wait for what is here, hand-overs and offers included; end the rest with an error."""
        self.status = "draining"
        deadline = time.monotonic() + grace_s
        try:
            async with asyncio.timeout(grace_s):
                await self._emptied.wait()
        except TimeoutError:
            for key in list(self._jobs):
                self.cancel(key, Draining("this prefill worker went away", retry_after_s=1.0))
            await asyncio.wait({asyncio.ensure_future(self._emptied.wait())}, timeout=5.0)
        await self._outbox.flush()
        self._recorder.untold.tell_all()
        await self._store.drain(max(0.0, deadline - time.monotonic()))
