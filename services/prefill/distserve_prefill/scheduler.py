"""Which prompts, and how much of each, the next forward pass computes. Decides, never computes.

First come, first served, with the whole prompt's blocks allocated at admission: a prompt that has started can
always end, so partly computed prompts can't block each other.
"""

from collections import deque

from distserve.engine.batching import Batch, Work, chunk_tokens
from distserve.kv.block_pool import BlockPool
from distserve.messages import num_blocks_for
from distserve_prefill.job import Job


class Scheduler:
    def __init__(self, pool: BlockPool, *, block_size: int, max_batch_tokens: int, chunk_tokens: int) -> None:
        """`max_batch_tokens`: tokens of one pass; `chunk_tokens`: of one sequence in it (0: the whole prompt)."""
        self._pool = pool
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._chunk_tokens = chunk_tokens
        self.waiting: deque[Job] = deque()
        self.started: list[Job] = []  # admitted, not wholly computed

    @property
    def num_waiting_tokens(self) -> int:
        return sum(j.sequence.num_uncomputed_tokens for j in (*self.waiting, *self.started))

    def add(self, job: Job) -> None:
        self.waiting.append(job)

    def remove(self, job: Job) -> None:
        """Take it out, wherever it stands. Its blocks are the caller's to free."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self.started:
            self.started.remove(job)

    def next_batch(self) -> tuple[Batch, list[Job]]:
        """The next pass and the jobs it belongs to, work by work. Empty if nothing can run now."""
        batch, jobs = Batch(), list[Job]()
        budget = self._max_batch_tokens
        for job in self.started:
            budget = self._take(job, budget, batch, jobs)
        while self.waiting and budget > 0:
            job = self.waiting[0]
            blocks = num_blocks_for(len(job.sequence.token_ids), self._block_size)
            whole = not self._chunk_tokens and job.sequence.num_uncomputed_tokens > budget
            if blocks > self._pool.num_free or (whole and batch.work):
                break
            before = len(batch.work)
            budget = self._take(job, budget, batch, jobs)
            if len(batch.work) == before:
                break
            self.waiting.popleft()
            self.started.append(job)
            job.sequence.block_table = self._pool.allocate(blocks)
        return batch, jobs

    def _take(self, job: Job, budget: int, batch: Batch, jobs: list[Job]) -> int:
        sequence = job.sequence
        if self._chunk_tokens:
            num = chunk_tokens(sequence, min(budget, self._chunk_tokens), self._block_size)
        else:  # a prompt longer than the budget runs alone
            num = sequence.num_uncomputed_tokens if sequence.num_uncomputed_tokens <= budget or not batch.work else 0
        if num:
            start = sequence.num_computed_tokens
            batch.work.append(Work(sequence, start, num, samples=start + num == len(sequence.token_ids)))
            jobs.append(job)
        return budget - num

    def computed(self, job: Job, num_tokens: int) -> None:
        """A pass has computed num_tokens more of it."""
        job.sequence.num_computed_tokens += num_tokens
        if job.sequence.num_uncomputed_tokens == 0:
            self.started.remove(job)
