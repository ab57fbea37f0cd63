"""A decode worker in virtual time: the worker's own scheduler, a clock that is set, steps that take what a PassSpeed
says. Sequences come with their KV and their first token, and are taken in order of arrival while there is room."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.load_stats import percentile
from benchmarks.sim.machines import BLOCK, Machine
from benchmarks.sim.traces import Arrival
from benchmarks.sim.world import JITTER, Clock, Noise, Policy, pool
from distserve.engine.batching import Batch
from distserve.engine.sequence import Sequence as Answer
from distserve.messages import Priority, SamplingParams, SequenceKey, num_blocks_for
from distserve_decode.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Ended:
    """Times on the simulation's clock: taken (with its first token), its last token."""

    arrival: Arrival
    taken_s: float
    last_token_s: float

    @property
    def tpot_s(self) -> float:
        return (self.last_token_s - self.taken_s) / (self.arrival.num_output_tokens - 1)

    @property
    def kept(self) -> bool:
        return self.arrival.slo.tpot_s is None or self.tpot_s <= self.arrival.slo.tpot_s


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one run. `kept`: parts of the promised; `tpot_s`: P50 and P99 of all; `most_missed`: steps in a row that a
    sequence was passed over."""

    side: str
    load: float
    kept: float
    kept_by_class: dict[Priority, float]
    tokens_per_s: float
    tpot_s: tuple[float, float]
    most_missed: int


class Decoder:
    """One run over a trace."""

    def __init__(self, machine: Machine, policy: Policy, *, seed: int = 0, jitter: float = JITTER) -> None:
        self._machine = machine
        self._clock = Clock()
        self._noise = Noise(seed, jitter)
        self._pool, prefixes = pool()
        self._scheduler = Scheduler(
            self._pool,
            prefixes,
            block_size=BLOCK,
            max_num_seqs=machine.max_num_seqs,
            chunk_tokens=256,
            policy=policy,
            clock=self._clock,
        )
        self._taken: dict[Answer, tuple[Arrival, float]] = {}
        self._missed: Counter[Answer] = Counter()  # steps in a row
        self._num_taken = 0
        self.most_missed = 0
        self.ended: list[Ended] = []

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def play(self, trace: Sequence[Arrival]) -> None:
        """Until every answer has ended. Raises RuntimeError if the scheduler lets one lie."""
        pending = deque(trace)
        while pending or self._taken:
            while pending and pending[0].at_s <= self.now_s and len(self._taken) < self._machine.max_num_seqs:
                self._take(pending.popleft())
            if not self._taken:
                self._clock.now_s = pending[0].at_s
                continue
            batch = self._scheduler.next_batch()
            if not batch.work:
                raise RuntimeError(f"none of {len(self._taken)} sequences steps")
            self._step(batch)
        self._pool.check()

    def _take(self, arrival: Arrival) -> None:
        self._num_taken += 1
        num, sampling = arrival.num_tokens, SamplingParams(max_tokens=arrival.num_output_tokens)
        sequence = Answer(SequenceKey(str(self._num_taken)), [0] * (num + 1), num, sampling, num_computed_tokens=num)
        sequence.block_table = self._pool.allocate(num_blocks_for(num, BLOCK))
        self._taken[sequence] = arrival, self.now_s
        self._scheduler.adopt(sequence, arrival.slo)

    def _step(self, batch: Batch) -> None:
        context = sum(w.start + 1 for w in batch.work)
        seconds = self._noise.on(self._machine.decode.seconds(batch.num_tokens, context))
        self._clock.now_s += seconds
        self._scheduler.note_pass(batch, seconds)
        stepped = {w.sequence for w in batch.work}
        for sequence in self._taken:
            self._missed[sequence] = 0 if sequence in stepped else self._missed[sequence] + 1
        self.most_missed = max(self.most_missed, *self._missed.values())
        for work in batch.work:
            work.sequence.num_computed_tokens += work.num_tokens
            work.sequence.token_ids.append(0)
            if work.sequence.num_output_tokens == work.sequence.sampling.max_tokens:
                self._end(work.sequence)

    def _end(self, sequence: Answer) -> None:
        self._scheduler.lengths.note(sequence.num_output_tokens)
        self._scheduler.remove(sequence)
        del self._missed[sequence]
        arrival, taken_s = self._taken.pop(sequence)
        self.ended.append(Ended(arrival, taken_s, self.now_s))


def steps(machine: Machine, policy: Policy, load: float, trace: Sequence[Arrival], *, seed: int = 0) -> Steps:
    worker = Decoder(machine, policy, seed=seed)
    worker.play(trace)
    tpots = [e.tpot_s for e in worker.ended]
    classes: tuple[Priority, ...] = "vip", "normal", "batch"
    return Steps(
        side=policy,
        load=load,
        kept=part_kept(worker.ended),
        kept_by_class={p: part_kept(e for e in worker.ended if e.arrival.slo.priority == p) for p in classes},
        tokens_per_s=sum(e.arrival.num_output_tokens for e in worker.ended) / worker.now_s,
        tpot_s=(percentile(tpots, 50), percentile(tpots, 99)),
        most_missed=worker.most_missed,
    )


def part_kept(ended: Iterable[Ended]) -> float:
    """Of those that were promised something; nan if none was."""
    kept = [e.kept for e in ended if e.arrival.slo.tpot_s is not None]
    return sum(kept) / len(kept) if kept else float("nan")
