"""Which prompts, and how much of each, the next forward pass computes. Decides, never computes: no clock but the one
it is given, no thread, no bus.

The order is that of order.py, the guard under it shares.py, what goes into a pass packing.py; docs/scheduling.md says
why. Here are the blocks. The whole prompt's are held from admission on: a prompt that has begun can always end, so
partly computed prompts can't block each other. Prompts that wait hold nothing, not even their prefix hits, which would
keep room from the one before them: they are looked for when the prompt's turn has come. If there is no room for it,
nobody behind it is admitted either, so that room which comes back is its own.

One whose next block a started prompt is computing waits until that is done, so that outputs of one prompt that arrive
together are computed once. Whenever its turn comes the started one is computed in its stead: it waits no longer than
it would take to compute the same itself.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from distserve.engine.batching import Batch, Work
from distserve.kv.block_pool import BlockPool
from distserve.messages import Priority, num_blocks_for, pairs
from distserve.worker.due import stands_back_s
from distserve.worker.pass_model import LEAST_PASSES, PassModel
from distserve.worker.prefixes import Prefixes
from distserve_prefill.alike import computing_for, num_common
from distserve_prefill.course import Course
from distserve_prefill.job import Job
from distserve_prefill.order import Flow, Place, Rules, bucket_of, settle
from distserve_prefill.packing import by_flow, fill
from distserve_prefill.shares import Shares

EFFICIENT_SHARE = 0.95  # of the tokens a second that the longest passes give: longer ones only delay who waits
HURRIES_S = 60.0  # so long after a prompt that is in a hurry another is expected


@dataclass(slots=True)
class _UnderWay:
    """The pass that is being run."""

    until: float = -math.inf  # expected
    jobs: set[Job] = field(default_factory=set)


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        prefixes: Prefixes,
        *,
        block_size: int,
        max_batch_tokens: int,
        chunk_tokens: int,
        policy: Literal["slo", "fcfs"],
        weights: Mapping[Priority, int],
        model: PassModel,
        longest_pause_s: float = math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_batch_tokens`: tokens of one pass, at most; `chunk_tokens`: of one sequence in it, a multiple of
        block_size (0: the whole prompt); `model`: what passes take; `longest_pause_s`: between two chunks of a
        prompt."""
        self.model = model
        self._pool = pool
        self._prefixes = prefixes
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._chunk_tokens = chunk_tokens
        self._fair = policy == "slo"
        self._longest_pause_s = longest_pause_s
        self._now = now
        self._shares = Shares(weights)
        self._serials = itertools.count()
        self._jobs: dict[Place, Job] = {}  # those of both lists
        self._under_way = _UnderWay()
        self._computed_at = now()  # the last pass, or when this began
        self._hurried_at = -math.inf  # when one was here last that is in a hurry
        self._reckoned = model.speed  # when the queue was empty last: by it equal prompts go as they came
        self.waiting: list[Job] = []  # in order
        self.started: list[Job] = []  # admitted, not wholly computed

    @property
    def num_waiting_tokens(self) -> int:
        return sum(j.sequence.num_uncomputed_tokens for j in (*self.waiting, *self.started))

    @property
    def pass_tokens(self) -> int:
        """Of the next pass, at most: what is nearly as efficient as the longest, once that is known and where somebody
        may be in a hurry."""
        hurries = self._now() - self._hurried_at < HURRIES_S
        if not self._fair or not hurries or self.model.num_passes < LEAST_PASSES:
            return self._max_batch_tokens
        efficient = self.model.efficient_tokens(EFFICIENT_SHARE)
        if not efficient:
            return self._max_batch_tokens
        return min(self._max_batch_tokens, num_blocks_for(efficient, self._block_size) * self._block_size)

    @property
    def num_spoken_for(self) -> int:
        """Blocks that those that the next pass can admit will need, if nothing is found of them. (A long queue behind
        them is no reason to do without the store.)"""
        rules = self._rules()
        room, num, budget = self._pool.num_available, 0, rules.pass_tokens
        for place in sorted(self._jobs, key=rules.key):
            if budget <= 0:
                break
            job = self._jobs[place]
            if place.begun == math.inf:
                if self._computing_for(job) is not None:
                    continue
                needs = num_blocks_for(len(job.sequence.token_ids), self._block_size)
                if num + needs > room:
                    break
                num += needs
            num_tokens = job.sequence.num_uncomputed_tokens
            budget -= min(num_tokens, self._chunk_tokens) if self._chunk_tokens else num_tokens
        return num

    def place_of(self, job: Job, num_held: int | None = None) -> Place:
        """Where it would stand if it joined now. What is in the pool need not be computed, nor what those before it in
        order will have; num_held: tokens of its beginning, to be taken for the former."""
        held = self._prefixes.num_held_tokens(job.sequence) if num_held is None else num_held
        num, slo = len(job.sequence.token_ids), job.request.slo
        if slo.ttft_s is not None or slo.priority == "vip":  # refused ones, too: shorter passes may let the next one in
            self._hurried_at = self._now()
        rules = self._rules()
        if not self._jobs:
            self._reckoned = self.model.speed
        promised = due = math.inf if slo.ttft_s is None else job.accepted_at + slo.ttft_s
        if slo.ttft_s is None:
            due = job.accepted_at + stands_back_s(slo.priority, rules.alone_s(self._reckoned, num - held, held))
        place = Place(Flow(slo.priority, 0), due, promised, (job.accepted_at, next(self._serials)), num - held, held)
        before = (other for at, other in self._jobs.items() if rules.key(at) < rules.key(place))
        held = max(held, self._block_size * num_common(self._prefixes.wanted(job.sequence), before))
        place.left, place.done = num - held, held
        place.flow = Flow(slo.priority, bucket_of(place.left))
        return place

    def num_wanted_tokens(self, job: Job) -> int:
        """Of its beginning, those that need not be computed if they are had."""
        return len(self._prefixes.wanted(job.sequence)) * self._block_size

    def course(self, also: Iterable[Place] = ()) -> Course:
        """What will become of the queue if nothing else comes; `also`: prompts that are about to join it. By the speed
        by which promises are given: PassModel.advertised()."""
        now, also = self._now(), tuple(also)
        speed = self.model.advertised(0.0 if self._jobs or also else now - self._computed_at)
        busy_until = max(now, self._under_way.until) if self._under_way.jobs else now
        course = Course(self._rules(), speed, self._jobs, self._shares.copy(), now, busy_until)
        for place in also:
            course.add(place)
        return course

    def add(self, job: Job) -> None:
        """It has a place by when it was received, wherever it has been meanwhile."""
        job.place = place = self.place_of(job)
        self._jobs[place] = job
        self._shares.join(place.flow)
        self.waiting.append(job)
        key = self._rules().key
        self.waiting.sort(key=lambda j: key(_place(j)))

    def remove(self, job: Job) -> None:
        """Take it out, wherever it stands. Its blocks are the caller's to free."""
        if job.place is None or self._jobs.pop(job.place, None) is None:
            return
        (self.waiting if job.place.begun == math.inf else self.started).remove(job)
        self._shares.leave(job.place.flow)
        self._under_way.jobs.discard(job)

    def next_batch(self) -> tuple[Batch, list[Job]]:
        """The next pass and the jobs it belongs to, work by work. Empty if nothing can run now."""
        now, speed = self._now(), self.model.speed
        if any(place.hurries for place in self._jobs):
            self._hurried_at = now
        rules = self._rules()
        if self._fair:
            settle(self._jobs, rules, speed, now)
        ranked = sorted(self._jobs, key=rules.key)
        owed = self._shares.owed(rules.pass_tokens) if self._fair else []
        taken = fill(ranked, owed, rules, now, self)
        most: Counter[Flow] = Counter()
        for place in ranked:
            most[place.flow] += rules.most(place)
        self._shares.serve(by_flow(taken), most)
        self.waiting = [self._jobs[p] for p in ranked if p.begun == math.inf]
        batch, jobs, num_pairs = Batch(), list[Job](), 0.0
        for place, num in taken.items():
            job = self._jobs[place]
            sequence, start = job.sequence, job.sequence.num_computed_tokens
            batch.work.append(Work(sequence, start, num, samples=start + num == len(sequence.token_ids)))
            jobs.append(job)
            num_pairs += pairs(num, start)
            place.left -= num
            place.done += num
        self._under_way = _UnderWay(now + speed.seconds(batch.num_tokens, num_pairs), set(jobs))
        return batch, jobs

    def computed(self, job: Job, num_tokens: int) -> None:
        """A pass has computed num_tokens more of it."""
        job.sequence.num_computed_tokens += num_tokens
        self._computed_at = self._now()
        self._under_way.jobs.discard(job)
        if job.sequence.num_uncomputed_tokens == 0:
            self.remove(job)

    def note_pass(self, batch: Batch, seconds: float) -> None:
        """How long a pass has lasted that worked: the model learns from it."""
        self.model.note(batch.num_tokens, sum(pairs(w.num_tokens, w.start) for w in batch.work), seconds)

    # ------------------------------------------------------------ the gate through which passes admit (packing.Gate)

    def enter(self, place: Place) -> Place | None:
        """It has its blocks from now on, unless another is computing what it lacks, or there is no room for it."""
        job = self._jobs[place]
        other = self._computing_for(job)
        if other is not None:
            return other.place
        if not self._prefixes.admit(job.sequence):
            return None
        place.left, place.done = job.sequence.num_uncomputed_tokens, job.sequence.num_computed_tokens
        self.started.append(job)  # now: another in the same pass may lack what it computes
        return place

    def put_back(self, place: Place) -> None:
        self.started.remove(self._jobs[place])
        sequence = self._jobs[place].sequence
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_named_blocks = sequence.num_computed_tokens = sequence.num_cached_tokens = 0

    def _computing_for(self, job: Job) -> Job | None:
        return computing_for(self._prefixes.wanted(job.sequence), self.started, self._pool)

    def _rules(self) -> Rules:
        return Rules(self._fair, self.pass_tokens, self._chunk_tokens, self._block_size, self._longest_pause_s)


def _place(job: Job) -> Place:
    assert job.place is not None
    return job.place
