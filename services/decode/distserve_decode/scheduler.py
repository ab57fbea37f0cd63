"""Which sequences step next. Decides, never computes.

Every running sequence steps in every pass; what it must compute beyond one token (a prompt in colocated mode, or
everything again after a preemption) comes in chunks beside the steps of the others, which it may only hold up so much
(pace.py). What the pool holds of a sequence's beginning when its turn comes is not computed again. A pool that runs
full preempts the youngest: its blocks are freed, and what is gone of them by then is computed again later, from its
tokens.
"""

from collections import deque
from itertools import islice

from distserve.engine.batching import Batch, Work, chunk_tokens
from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import num_blocks_for
from distserve.worker.prefixes import Prefixes
from distserve_decode.pace import Pace


class Scheduler:
    def __init__(
        self, pool: BlockPool, prefixes: Prefixes, *, block_size: int, max_num_seqs: int, chunk_tokens: int
    ) -> None:
        """`max_num_seqs`: sequences in a pass; `chunk_tokens`: prompt tokens in it, at most."""
        self._pool = pool
        self._prefixes = prefixes
        self._block_size = block_size
        self._pace = Pace(chunk_tokens=chunk_tokens, block_size=block_size)
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()  # without blocks; the preempted first
        self.running: list[Sequence] = []  # with blocks, oldest first
        self.num_preemptions = 0

    @property
    def num_waiting_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.waiting) + sum(
            s.num_uncomputed_tokens for s in self.running if s.num_uncomputed_tokens > 1
        )

    @property
    def num_spoken_for(self) -> int:
        """Blocks that those that run need soon and, if nothing is found of them, those that the next pass can admit and
        those that were preempted. (A long queue behind them is no reason to do without the store.)"""
        num = len(self.running)
        for sequence in islice(self.waiting, max(0, self.max_num_seqs - len(self.running))):
            needs = num_blocks_for(len(sequence.token_ids), self._block_size)
            if num + needs > self._pool.num_available and not sequence.num_preemptions:
                break
            num += needs
        return num

    def submit(self, sequence: Sequence) -> None:
        """It waits for its turn. Nothing of it is computed yet."""
        self.waiting.append(sequence)

    def admit(self, sequence: Sequence) -> bool:
        """Its turn has come: blocks for all of it, those that hold its beginning and room for the rest. False, and it
        has none, if there is not enough."""
        spare = 1 if self.running else 0  # so that it is not the next step's victim at once
        if not self._prefixes.admit(sequence, spare=spare):
            return False
        if not sequence.num_preemptions:
            self._prefixes.note_begun(sequence)
        self.running.append(sequence)
        return True

    def adopt(self, sequence: Sequence) -> None:
        """Its KV is here already, in the blocks of its table."""
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take it out and free its blocks. Not while a pass that holds it is running."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._free(sequence)

    def note_pass(self, batch: Batch, seconds: float) -> None:
        """How long a pass has lasted: by that the prompts' part of later ones is measured."""
        num_steps = sum(1 for w in batch.work if w.num_tokens == 1)
        self._pace.note(num_steps, batch.num_tokens - num_steps, seconds)

    def next_batch(self) -> Batch:
        batch = Batch()
        for sequence in list(self.running):
            if sequence.num_uncomputed_tokens == 1 and self._make_room(sequence):
                batch.work.append(Work(sequence, sequence.num_computed_tokens, 1, samples=True))
        budget = self._pace.prompt_tokens(num_steps=len(batch.work))
        for sequence in self.running:
            if sequence.num_uncomputed_tokens > 1:
                budget = self._take_chunk(sequence, budget, batch)
        while budget > 0 and self.waiting and len(self.running) < self.max_num_seqs:
            if not self.admit(self.waiting[0]):
                break
            budget = self._take_chunk(self.waiting.popleft(), budget, batch)
        return batch

    def _take_chunk(self, sequence: Sequence, budget: int, batch: Batch) -> int:
        num = chunk_tokens(sequence, budget, self._block_size)
        if num:
            start = sequence.num_computed_tokens
            batch.work.append(Work(sequence, start, num, samples=start + num == len(sequence.token_ids)))
        return budget - num

    def _make_room(self, sequence: Sequence) -> bool:
        """A block for its next token, taken from the youngest if the pool is full. False if that was itself, or if
        it was preempted for an older one."""
        if not sequence.block_table:  # preempted: what runs has blocks
            return False
        missing = sequence.blocks_missing(len(sequence.token_ids), self._block_size)
        while missing > self._pool.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table += self._pool.allocate(missing)
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._free(victim)
        victim.num_computed_tokens = victim.num_named_blocks = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _free(self, sequence: Sequence) -> None:
        self._pool.free(sequence.block_table)
        sequence.block_table = []
