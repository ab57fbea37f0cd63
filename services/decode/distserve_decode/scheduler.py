"""Which sequences step next, and which prompts are computed beside them. Decides, never computes.

Every running sequence steps in every pass, but where somebody's promise asks for shorter ones (steps.py). What must be
computed beyond one token (a prompt of our own, or everything again after a preemption) comes in chunks beside the steps
of the others, which it may only hold up so much (pace.py): by when it is due, so that an urgent prompt enters between
two chunks of a long one. What the pool holds of a sequence's beginning when its turn comes is not computed again.

A sequence begins where there is room for it and for what it and the others are expected to grow by (room.py). A pool
that runs full all the same preempts the last of the lowest class: its blocks are freed, or given away first
(elsewhere.py), and what is gone of them by then is computed again later, from its tokens.

With policy "fcfs" there are no classes and no dues: first come, first served, and the youngest is preempted.
"""

import math
import time
from bisect import bisect_right, insort
from collections.abc import Callable
from itertools import islice
from typing import Literal

from distserve.engine.batching import Batch, Work, chunk_tokens
from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import Slo
from distserve.worker.due import due_at
from distserve.worker.prefixes import Prefixes
from distserve_decode.elsewhere import Elsewhere, Nowhere
from distserve_decode.lengths import Lengths, guess_tokens
from distserve_decode.pace import Pace
from distserve_decode.room import Room
from distserve_decode.speeds import Speeds
from distserve_decode.standing import Standing
from distserve_decode.steps import Steps, period_s

NO_SLO = Slo()


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        prefixes: Prefixes,
        *,
        block_size: int,
        max_num_seqs: int,
        chunk_tokens: int,
        policy: Literal["slo", "fcfs"] = "slo",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_num_seqs`: sequences in a pass; `chunk_tokens`: prompt tokens in it, at most. `clock`: seconds."""
        self._pool = pool
        self._prefixes = prefixes
        self._block_size = block_size
        self.by_due = policy == "slo"
        self._pace = Pace(chunk_tokens=chunk_tokens, block_size=block_size)
        self._standings: dict[Sequence, Standing] = {}
        self._num_came = 0
        self.clock = clock
        self.chunk_tokens = chunk_tokens
        self.lengths = Lengths(guess_tokens(pool.num_total, block_size))
        self.speeds = Speeds()
        self._steps = Steps(self.speeds, self.num_left)
        self._limit_s = math.inf  # of the last pass, for a promise's sake
        self.room = Room(pool, self.lengths, block_size=block_size, max_num_seqs=max_num_seqs, foresees=policy == "slo")
        self.elsewhere: Elsewhere = Nowhere()
        self.may_begin: Callable[[Sequence], bool] = lambda sequence: True  # False: others than those here come first
        self.arriving: list[Sequence] = []  # blocks are fetched for them before they wait
        self.waiting: list[Sequence] = []  # without blocks, in the order in which they go on
        self.running = self.room.running  # with blocks: by class, and oldest first in it
        self.num_preemptions = 0

    @property
    def max_num_seqs(self) -> int:
        return self.room.max_num_seqs

    @property
    def num_passed_over(self) -> int:
        """Steps that sequences did not take for the sake of others' promises."""
        return self._steps.num_passed_over

    @property
    def prompts(self) -> list[Sequence]:
        """Those of which more than a token is to be computed."""
        started = [s for s in self.running if s.num_uncomputed_tokens > 1]
        return started + self.room.coming + self.waiting + self.arriving

    @property
    def num_waiting(self) -> int:
        return len(self.room.coming) + len(self.waiting) + len(self.arriving)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(s.num_uncomputed_tokens for s in self.prompts)

    @property
    def num_spoken_for(self) -> int:
        """Blocks that those that run need soon and, if nothing is found of them, those that the next pass can admit and
        those that were preempted. (A long queue behind them is no reason to do without the store.)"""
        num = len(self.running)
        if self.room.coming:  # what is fetched is for those, who go first
            return num
        for sequence in islice(self.waiting, max(0, self.max_num_seqs - len(self.running))):
            needs = self.room.needs(sequence)
            if num + needs > self._pool.num_available and not sequence.num_preemptions:
                break
            num += needs
        return num

    @property
    def pass_tokens(self) -> int:
        """Of prompts, in one pass beside the steps of those that run now; one at least."""
        num_steps = sum(1 for s in self.running if s.num_uncomputed_tokens == 1)
        return self._pace.usual_tokens(num_steps, self._limit_s)

    def num_left(self, sequence: Sequence) -> int:
        """Tokens that it is expected to go on for."""
        num = sequence.num_output_tokens
        return self.lengths.expected(num, sequence.sampling.max_tokens) - num

    def standing(self, sequence: Sequence) -> Standing:
        """Of one that is here."""
        return self._standings[sequence]

    # ------------------------------------------------------------ they come and go

    def submit(self, sequence: Sequence, slo: Slo = NO_SLO, *, is_arriving: bool = False) -> None:
        """It waits for its turn. Nothing of it is computed yet. is_arriving: not before resume()."""
        self._register(sequence, slo, self._prefixes.num_held_tokens(sequence))
        if is_arriving:
            self.arriving.append(sequence)
        else:
            self._queue(sequence)

    def admit(self, sequence: Sequence, slo: Slo = NO_SLO) -> bool:
        """Its turn has come without waiting: blocks for all of it, those that hold its beginning and room for the rest.
        False, and it is not here, if there is not enough."""
        self._register(sequence, slo, self._prefixes.num_held_tokens(sequence))
        if self._begin(sequence):
            return True
        del self._standings[sequence]
        return False

    def adopt(self, sequence: Sequence, slo: Slo = NO_SLO) -> None:
        """Its KV is here already, in the blocks of its table."""
        self._register(sequence, slo, 0)
        self._run(sequence)

    def resume(self, sequence: Sequence) -> None:
        """What others hold of it has been fetched, as far as it is to be had. Without effect once it is removed."""
        for place in (self.room.coming, self.arriving):
            if sequence in place:
                place.remove(sequence)
                self._queue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take it out and free its blocks. Not while a pass that holds it is running."""
        for place in (self.running, self.waiting, self.room.coming, self.arriving):
            if sequence in place:
                place.remove(sequence)
                break
        self._standings.pop(sequence, None)
        self._steps.discard(sequence)
        self._free(sequence)

    def _register(self, sequence: Sequence, slo: Slo, num_found: int) -> None:
        self._num_came += 1
        order: float = self._num_came
        if self.by_due:
            num_new = len(sequence.token_ids) - num_found
            own_s = self.speeds.prompts.speed.prefill_s(num_new, num_found, self.chunk_tokens)
            order = due_at(slo, self.clock(), own_s)
        self._standings[sequence] = Standing(slo, (order, self._num_came), num_found)

    def _order(self, sequence: Sequence) -> tuple[float, int]:
        return self._standings[sequence].order

    def _queue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=self._order)

    def _run(self, sequence: Sequence) -> None:
        standing = self._standings[sequence]
        if self.by_due:
            at = bisect_right(self.running, standing.rank, key=lambda s: self._standings[s].rank)
            self.running.insert(at, sequence)
            self._steps.add(sequence, standing.slo)
        else:
            self.running.append(sequence)

    # ------------------------------------------------------------ passes

    def note_pass(self, batch: Batch, seconds: float) -> None:
        """How long a pass has lasted, now that it has ended: by that later ones are measured."""
        num_steps = sum(1 for w in batch.work if w.num_tokens == 1)
        self._pace.note(num_steps, batch.num_tokens - num_steps, seconds)
        self.speeds.note(batch, num_steps, seconds)
        self._steps.note_pass(self.clock())

    def next_batch(self) -> Batch:
        """Empty only if nobody runs, and none of those that wait can begin."""
        steps = self._take_steps()
        batch = Batch([Work(s, s.num_computed_tokens, 1, samples=True) for s in steps])
        if self.waiting or len(steps) < len(self.running):
            self._add_prompts(batch, self._pace.prompt_tokens(len(batch.work), self._limit_s))
        self.speeds.begin(batch, self.clock())
        return batch

    def _take_steps(self) -> list[Sequence]:
        """Those that step, with a block for their next token each."""
        able = [s for s in self.running if s.num_uncomputed_tokens == 1]
        stepping: list[Sequence] = []
        self._limit_s = math.inf
        while able and not stepping:  # those that were chosen may all have lost their blocks: then others can go
            chosen, self._limit_s = self._steps.choose(able, self.clock())
            stepping = [s for s in chosen if self._make_room(s)]
            able = [s for s in able if s.block_table]
        self._steps.begin(able, stepping)
        return stepping

    def _add_prompts(self, batch: Batch, budget: int) -> None:
        started = [s for s in self.running if s.num_uncomputed_tokens > 1]
        if self.by_due:
            started.sort(key=self._order)
        may_begin, num_taken = True, 0
        while budget > 0:
            if may_begin and self.waiting and (num_taken == len(started) or self._is_before(started[num_taken])):
                head = self.waiting[0]
                may_begin = self._take_up(head)
                if not head.block_table:
                    continue
            elif num_taken < len(started):
                head = started[num_taken]
                num_taken += 1
            else:
                break
            budget = self._take_chunk(head, budget, batch)

    def _is_before(self, started: Sequence) -> bool:
        """Whether the first that waits goes before this one, which has begun."""
        return self.by_due and self._order(self.waiting[0]) < self._order(started)

    def _take_up(self, head: Sequence) -> bool:
        """The first that waits begins, or what it lacks is fetched first. False: it can't yet."""
        standing = self._standings[head]
        if self.room.num_seats <= 0 or not self.may_begin(head):
            return False
        if head.num_preemptions and not standing.was_sought and self.room.fits(head):
            standing.was_sought = True
            if self.elsewhere.bring(head):
                self.waiting.remove(head)
                self.room.coming.append(head)
                return True
        if not self._begin(head):
            return False
        self.waiting.remove(head)
        return True

    def _begin(self, sequence: Sequence) -> bool:
        if not self._prefixes.admit(sequence, spare=self.room.spare(self.room.growth(sequence))):
            return False
        if not sequence.num_preemptions:
            self._prefixes.note_begun(sequence)
        self._run(sequence)
        return True

    def _take_chunk(self, sequence: Sequence, budget: int, batch: Batch) -> int:
        num = chunk_tokens(sequence, budget, self._block_size)
        if num:
            start = sequence.num_computed_tokens
            batch.work.append(Work(sequence, start, num, samples=start + num == len(sequence.token_ids)))
        return budget - num

    # ------------------------------------------------------------ a full pool

    def _make_room(self, sequence: Sequence) -> bool:
        """A block for its next token, taken from the last of those that run if the pool is full. False if that was
        itself, or if it was preempted for one before it."""
        if not sequence.block_table:  # preempted: what runs has blocks
            return False
        missing = sequence.blocks_missing(len(sequence.token_ids), self._block_size)
        while missing > self._pool.num_available:
            victim = self.running[-1]
            self._preempt(victim, missing - self._pool.num_available)
            if victim is sequence:
                return False
        sequence.block_table += self._pool.allocate(missing)
        return True

    def _preempt(self, victim: Sequence, num_missing: int) -> None:
        # Of its blocks, those that others who run may need before what it gives away is free.
        self.elsewhere.give(victim, num_missing + len(self.running))
        self.num_preemptions += 1
        standing = self._standings[victim]
        if not self.by_due:
            standing.order = (-self.num_preemptions, 0)  # before all that have not begun
        elif victim.num_uncomputed_tokens == 1:  # its next token is late; else its first has its due
            standing.order = (self.clock() + period_s(standing.slo), standing.order[1])
        standing.was_sought, standing.num_found, standing.num_passed = False, 0, 0
        self.running.remove(victim)
        self._steps.discard(victim)
        self._free(victim)
        victim.num_computed_tokens = victim.num_named_blocks = 0
        victim.num_preemptions += 1
        self._queue(victim)

    def _free(self, sequence: Sequence) -> None:
        self._pool.free(sequence.block_table)
        sequence.block_table = []
