"""A prefill worker in virtual time: the worker's own scheduler with its pool and its model of passes, a clock that is
set, and passes that take what a PassSpeed says. No hand-over: a prompt's blocks are free with its first token."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.sim.fairness import BUCKETS, WEIGHTS, Flow, Shares, bucket_of
from benchmarks.sim.machines import BLOCK, Machine
from benchmarks.sim.traces import Arrival
from benchmarks.sim.world import JITTER, Clock, Noise, Side, pool
from distserve.engine.batching import Batch
from distserve.engine.sequence import Sequence as Prompt
from distserve.errors import SloUnattainable
from distserve.messages import SamplingParams, SequenceKey, Slo, SubmitRequest, pairs
from distserve.worker.pass_model import LEAST_PASSES, PassModel
from distserve_prefill.job import Job
from distserve_prefill.predicting import check
from distserve_prefill.scheduler import Scheduler

SAMPLING = SamplingParams(max_tokens=1)
SATURATED = 16  # prompts of a flow that fill a pass
SIDES = (Side("fcfs", "fcfs"), Side("slo", "slo"), Side("slo, admission", "slo", admission=True))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times on the simulation's clock; both inf for one that was refused."""

    arrival: Arrival
    began_s: float = math.inf  # its first chunk
    first_token_s: float = math.inf

    @property
    def refused(self) -> bool:
        return self.first_token_s == math.inf

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival.at_s

    @property
    def wait_s(self) -> float:
        return self.began_s - self.arrival.at_s

    @property
    def kept(self) -> bool:
        """What was promised; nothing can't be broken."""
        return self.arrival.slo.ttft_s is None or self.ttft_s <= self.arrival.slo.ttft_s


def flow_of(job: Job) -> Flow:
    return job.request.slo.priority, bucket_of(job.sequence.num_prompt_tokens)


@dataclass(slots=True)
class Run:
    side: str
    outcomes: list[Outcome] = field(default_factory=list)  # in order of their ends
    shares: Shares = field(default_factory=Shares)
    num_tokens: int = 0  # that passes have computed
    pass_tokens: int = 0  # the most that a pass might take
    ended_s: float = 0.0
    present_s: float = 0.0  # prompts in the worker, over time


class Worker:
    """One run over a trace."""

    def __init__(self, machine: Machine, side: Side, *, seed: int = 0, jitter: float = JITTER) -> None:
        self._machine = machine
        self._clock = Clock()
        self._noise = Noise(seed, jitter)
        self._pool, prefixes = pool()
        self._model = PassModel()
        self._scheduler = Scheduler(
            self._pool,
            prefixes,
            block_size=BLOCK,
            max_batch_tokens=machine.max_batch_tokens,
            chunk_tokens=machine.chunk_tokens,
            policy=side.policy,
            weights=WEIGHTS,
            model=self._model,
            now=self._clock,
        )
        self._admission = side.admission
        self._jobs: dict[Flow, dict[Job, Arrival]] = {}  # not wholly computed, by flow; none is empty
        self._num_offered = self._num_present = 0
        self._refill = False
        self.run = Run(side.name)

    def play(self, trace: Sequence[Arrival]) -> Run:
        """Until every prompt has ended. Raises RuntimeError if the scheduler lets one lie."""
        pending = deque(trace)
        while True:
            self._take(pending, self._clock.now_s)
            batch, jobs = self._scheduler.next_batch()
            if batch.work:
                self._pass(batch, jobs, pending)
            elif pending:
                self._set_clock(pending[0].at_s)
            else:
                break
        if self._num_present:
            raise RuntimeError(f"{self._num_present} prompts are never computed")
        self._pool.check()
        self.run.ended_s = self._clock.now_s
        return self.run

    def saturate(self, num_tokens: int) -> Run:
        """Every flow has SATURATED prompts at any time, each replaced as it is computed, until passes have had so many
        tokens."""
        for num in 3 * (64, 512, 2048, 8192):  # full passes alone don't tell what a pass costs of its own
            self._model.note(num, pairs(num, 0), self._noise.on(self._machine.prefill.seconds(num, pairs(num, 0))))
        self._refill = True
        for num in (*BUCKETS, 2 * BUCKETS[-1]):
            for priority in WEIGHTS:
                for _ in range(SATURATED):
                    self._offer(Arrival(0.0, num, slo=Slo(priority=priority)))
        while self.run.num_tokens < num_tokens:
            self._pass(*self._scheduler.next_batch(), deque())
        self.run.ended_s = self._clock.now_s
        return self.run

    def _take(self, pending: deque[Arrival], until_s: float) -> None:
        """Those that have come by then, each at its time."""
        while pending and pending[0].at_s <= until_s:
            arrival = pending.popleft()
            self._set_clock(max(self._clock.now_s, arrival.at_s))
            self._offer(arrival)

    def _offer(self, arrival: Arrival) -> None:
        self._num_offered += 1
        key, num = SequenceKey(str(self._num_offered)), arrival.num_tokens
        tokens = [0] * num
        request = SubmitRequest(
            key=key, model="", gateway="", token_ids=tokens, num_prompt_tokens=num, sampling=SAMPLING, slo=arrival.slo
        )
        job = Job(request, Prompt(key, tokens, num, SAMPLING), math.inf, accepted_at=self._clock.now_s)
        if self._admission and arrival.slo.ttft_s is not None and not self._may_come(job):
            self.run.outcomes.append(Outcome(arrival))
            return
        self._scheduler.add(job)
        self._jobs.setdefault(flow_of(job), {})[job] = arrival
        self._num_present += 1

    def _may_come(self, job: Job) -> bool:
        """As the worker decides it."""
        place = self._scheduler.place_of(job)
        try:
            check(self._scheduler.course(), place, spare=self._model.spare)
        except SloUnattainable:
            return False
        return True

    def _pass(self, batch: Batch, jobs: Sequence[Job], pending: deque[Arrival]) -> None:
        began_s, pass_tokens = self._clock.now_s, self._scheduler.pass_tokens
        num_pairs = sum(pairs(w.num_tokens, w.start) for w in batch.work)
        seconds = self._noise.on(self._machine.prefill.seconds(batch.num_tokens, num_pairs))
        most = {flow: self._most(its) for flow, its in self._jobs.items()}
        served: Counter[Flow] = Counter()
        for work, job in zip(batch.work, jobs, strict=True):
            served[flow_of(job)] += work.num_tokens
            if job.phase == "queued":
                job.phase, job.started_at = "prefill", began_s
        self._take(pending, began_s + seconds)
        self._set_clock(began_s + seconds)
        for work, job in zip(batch.work, jobs, strict=True):
            self._scheduler.computed(job, work.num_tokens)
            if work.samples:
                self._end(job)
        if self._model.num_passes >= LEAST_PASSES:  # until then passes are as long as may be
            self.run.shares.note(served, most)
            self.run.pass_tokens = max(self.run.pass_tokens, pass_tokens)
        self._scheduler.note_pass(batch, seconds)
        self.run.num_tokens += batch.num_tokens

    def _end(self, job: Job) -> None:
        self._pool.free(job.sequence.block_table)
        flow = flow_of(job)
        arrival = self._jobs[flow].pop(job)
        if not self._jobs[flow]:
            del self._jobs[flow]
        self._num_present -= 1
        self.run.outcomes.append(Outcome(arrival, job.started_at, self._clock.now_s))
        if self._refill:
            self._offer(replace(arrival, at_s=self._clock.now_s))

    def _most(self, jobs: Iterable[Job]) -> int:
        """Tokens of these that a pass could take; more than any takes is as good as all."""
        num = 0
        for job in jobs:
            num += min(self._machine.chunk_tokens, job.sequence.num_uncomputed_tokens)
            if num >= self._machine.max_batch_tokens:
                break
        return num

    def _set_clock(self, now_s: float) -> None:
        self.run.present_s += self._num_present * (now_s - self._clock.now_s)
        self._clock.now_s = now_s
