"""Which prompts, and how much of each, the next forward pass computes. Decides, never computes.

First come, first served, with the whole prompt's blocks held from admission on: a prompt that has started can always
end, so partly computed prompts can't block each other. Prompts that wait hold nothing, not even their prefix hits,
which would keep room from the one before them: they are looked for when the prompt's turn has come. One whose next
block a started prompt is computing is passed over until that is done, so that outputs of one prompt that arrive
together are computed once.
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
        made = self._being_made()
        for job in self.waiting:
            if self._is_coming(job, made):
                continue
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
        made = self._being_made()
        for job in list(self.waiting):
            if budget <= 0:
                break
            if self._is_coming(job, made):
                continue
            if not self._prefixes.admit(job.sequence):
                break
            before, budget = budget, self._take(job, budget, batch, jobs)
            if budget == before:  # this pass has no room for it; the next one may find more of it in the pool
                self._put_back(job)
                break
            self.waiting.remove(job)
            self.started.append(job)
            made += self._first_to_make(job)
        return batch, jobs

    def _being_made(self) -> list[tuple[int, bytes]]:
        """Depth and name of the block that each started prompt will be the first to have."""
        return [made for job in self.started for made in self._first_to_make(job)]

    def _first_to_make(self, job: Job) -> list[tuple[int, bytes]]:
        depth, chain = job.sequence.num_named_blocks, job.sequence.chain
        if chain is None or depth >= len(chain.hashes):
            return []
        # Not one that another has already, or whose beginning only it has, unnamed: who waits would not find it.
        names = chain.hashes[: depth + 1]
        return [(depth, names[-1])] if len(self._pool.find(names)) == depth else []

    def _is_coming(self, job: Job, made: list[tuple[int, bytes]]) -> bool:
        """One of those is a block that this prompt lacks: the next of its chain that is named. Chains that part before
        it have another one there."""
        if not made or (chain := job.sequence.chain) is None:
            return False
        num = len(self._prefixes.wanted(job.sequence))
        return any(depth < num and chain.hashes[depth] == name for depth, name in made)

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
