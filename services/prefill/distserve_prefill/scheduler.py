"""Which prompts, and how much of each, the next forward pass computes. Decides, never computes.

First come, first served, with the whole prompt's blocks held from admission on: a prompt that has started can always
end, so partly computed prompts can't block each other. Prompts that wait hold nothing, not even their prefix hits,
which would keep room from the one before them: they are looked for when the prompt's turn has come.
"""

from bisect import bisect
from collections import deque

from distserve.engine.batching import Batch, Work, chunk_tokens
from distserve.kv.block_pool import BlockPool
from distserve.messages import num_blocks_for
from distserve.worker.prefixes import Prefixes
from distserve_prefill.job import Job


class Scheduler:
    def __init__(
        self, pool: BlockPool, prefixes: Prefixes, *, block_size: int, max_batch_tokens: int, chunk_tokens: int
    ) -> None:
        """`max_batch_tokens`: tokens of one pass; `chunk_tokens`: of one sequence in it (0: the whole prompt)."""
        self._pool = pool
        self._prefixes = prefixes
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._chunk_tokens = chunk_tokens
        self.waiting: deque[Job] = deque()
        self.started: list[Job] = []  # admitted, not wholly computed

    @property
    def num_waiting_tokens(self) -> int:
        return sum(j.sequence.num_uncomputed_tokens for j in (*self.waiting, *self.started))

    @property
    def num_spoken_for(self) -> int:
        """Blocks that those that the next pass can admit will need, if nothing is found of them. (A long queue behind
        them is no reason to do without the store.)"""
        room, num = self._pool.num_available, 0
        budget = self._max_batch_tokens - sum(self._most(j) for j in self.started)
        for job in self.waiting:
            needs = num_blocks_for(len(job.sequence.token_ids), self._block_size)
            if budget <= 0 or num + needs > room:
                break
            num += needs
            budget -= self._most(job)
        return num

    def _most(self, job: Job) -> int:
        """Tokens of it in one pass, at most."""
        num = job.sequence.num_uncomputed_tokens
        return min(num, self._chunk_tokens) if self._chunk_tokens else num

    def add(self, job: Job) -> None:
        """In order of arrival, wherever it has been meanwhile."""
        self.waiting.insert(bisect(self.waiting, job.accepted_at, key=lambda j: j.accepted_at), job)

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
            if not self._admit(job):
                break
            before, budget = budget, self._take(job, budget, batch, jobs)
            if budget == before:  # this pass has no room for it; the next one may find more of it in the pool
                self._put_back(job)
                break
            self.waiting.popleft()
            self.started.append(job)
        return batch, jobs

    def _admit(self, job: Job) -> bool:
        """Blocks for all of it: those that hold its beginning, and room for the rest. False, and it has none, if there
        is not enough."""
        sequence = job.sequence
        hits = self._prefixes.acquire(sequence)
        missing = num_blocks_for(len(sequence.token_ids), self._block_size) - len(hits)
        if missing > self._pool.num_available:
            self._pool.free(hits)
            return False
        sequence.block_table = hits + self._pool.allocate(missing)
        sequence.num_named_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self._block_size
        sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        return True

    def _put_back(self, job: Job) -> None:
        sequence = job.sequence
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_named_blocks = sequence.num_computed_tokens = sequence.num_cached_tokens = 0

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
