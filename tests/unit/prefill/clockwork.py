"""A prefill worker's scheduler on a clock that tests set, with passes that take just as long as its model says."""

import copy
import functools
import math

from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import PassSpeed, Priority, SamplingParams, SequenceKey, Slo, SubmitRequest, pairs
from distserve.worker.pass_model import PassModel
from distserve.worker.prefixes import Prefixes
from distserve_prefill.job import Job
from distserve_prefill.scheduler import Scheduler
from tests.unit.worker.fakes import LAYOUT

BLOCK = 16
WEIGHTS: dict[Priority, int] = {"vip": 8, "normal": 4, "batch": 1}
SLOW = PassSpeed(pass_s=0.01, token_s=0.001)


def known(speed: PassSpeed = SLOW) -> PassModel:
    """A model that has seen passes which took just that."""
    return copy.deepcopy(_taught(speed))


@functools.cache
def _taught(speed: PassSpeed) -> PassModel:
    model = PassModel()
    for num in range(200):
        num_tokens, num_cached = 16 * (1 + num % 13), 100 * (num % 7)
        num_pairs = pairs(num_tokens, num_cached)
        model.note(num_tokens, num_pairs, speed.seconds(num_tokens, num_pairs))
    return model


class Clockwork:
    """Hands nothing over: a prompt's blocks are free when it is computed."""

    def __init__(
        self,
        *,
        policy: str = "slo",
        num_blocks: int = 4000,
        max_batch_tokens: int = 256,
        chunk_tokens: int = 64,
        model: PassModel | None = None,
        weights: dict[Priority, int] = WEIGHTS,
        keep: bool = False,
        longest_pause_s: float = math.inf,
    ) -> None:
        self.now = 100.0
        self.pool = BlockPool(num_blocks + 1, keep=keep)
        self.prefixes = Prefixes(self.pool, LAYOUT, keep=keep)
        self.model = known() if model is None else model
        self.scheduler = Scheduler(
            self.pool,
            self.prefixes,
            block_size=BLOCK,
            max_batch_tokens=max_batch_tokens,
            chunk_tokens=chunk_tokens,
            policy=policy,  # type: ignore[arg-type]
            weights=weights,
            model=self.model,
            longest_pause_s=longest_pause_s,
            now=lambda: self.now,
        )
        self.ended: dict[str, float] = {}  # when each prompt was computed
        self._running: list[tuple[Job, int]] = []
        self._until = math.inf

    def job(self, num_tokens: int, name: str, slo: Slo = Slo(), token_ids: list[int] | None = None) -> Job:
        key, sampling = SequenceKey(name), SamplingParams(max_tokens=8)
        ids = [1] * num_tokens if token_ids is None else token_ids
        request = SubmitRequest(
            key=key, model="m", gateway="g", token_ids=ids, num_prompt_tokens=len(ids), sampling=sampling, slo=slo
        )
        sequence = Sequence(key, list(ids), len(ids), sampling, chain=self.prefixes.chain_of(request))
        return Job(request, sequence, deadline=math.inf, accepted_at=self.now)

    def add(self, num_tokens: int, name: str, slo: Slo = Slo(), token_ids: list[int] | None = None) -> Job:
        job = self.job(num_tokens, name, slo, token_ids)
        self.scheduler.add(job)
        return job

    def begin(self) -> list[tuple[str, int, int]]:
        """A pass, if none is under way and there is something to compute: (name, start, num_tokens) of each work."""
        assert not self._running
        batch, jobs = self.scheduler.next_batch()
        if not batch.work:
            return []
        num_pairs = sum(pairs(w.num_tokens, w.start) for w in batch.work)
        self._until = self.now + self.model.speed.seconds(batch.num_tokens, num_pairs)
        self._running = [(j, w.num_tokens) for w, j in zip(batch.work, jobs, strict=True)]
        return [(j.key.request_id, w.start, w.num_tokens) for w, j in zip(batch.work, jobs, strict=True)]

    def end(self) -> None:
        """The pass under way, and it is as late as that."""
        self.now = self._until
        running, self._running, self._until = self._running, [], math.inf
        for job, num_tokens in running:
            self.scheduler.computed(job, num_tokens)
            self.prefixes.name(job.sequence)
            if not job.sequence.num_uncomputed_tokens:
                self.ended[job.key.request_id] = self.now
                self.pool.free(job.sequence.block_table)
                job.sequence.block_table = []

    def run(self) -> list[tuple[str, int, int]]:
        """One pass, from its beginning to its end."""
        rows = self.begin()
        if rows:
            self.end()
        return rows

    def play(self, until: float = math.inf) -> None:
        """Pass after pass, until then or until there is nothing to compute. A pass may be under way then."""
        while self._running or self.begin():
            if self._until > until:
                break
            self.end()
        self.now = until if until < math.inf else self.now
