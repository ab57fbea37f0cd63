"""What it costs to run a sequence on a worker, in tokens of prefill: the work of computing the KV of one.

With n tokens of prompt, of which `held(w)` leading ones seem to lie on worker w, and reach = the most that P or any
decode worker it could fetch from holds:

    wait(w)    what is queued there by its last heartbeat, and what this gateway has sent there since
    P          wait(P) + (n - reach) + MOVE * (reach - held(P))     computed there; fetched from a decode worker
    D          wait(D) + (n - held(D))                              tokens it has to carry, and to take in
    P, then D  P + MOVE * D
    D alone    (waiting and local prefills there) + (n - held(D)) + MOVE * D

MOVE is what moving a token's KV costs against computing it. Measured over shared memory: a twentieth (RESULTS.md, "Time
to first token, by where the prefix lies"); twice that is taken, since the one it comes from has work with it too. D
carries a sequence until its end, so its wait is large; weighed by MOVE it decides between a queue at P and a crowd at D
only where the crowd is large. A prefix of k tokens thus makes up for a decode worker's load of k more tokens, no more.

Promises come before costs (Tier): a worker that keeps them is preferred to one that is late by what is predicted
(predicting.py), and decode workers that have no slot left come last.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distserve.messages import Load, WorkerInfo
from distserve_gateway.predicting import UNPROMISED, Ahead, Heard, Need, Prediction, Standing, predict, retry_after

MOVE = 0.1

# A conversation stays where it was unless that costs this much more than elsewhere: two chunks of prefill
# (prefill.chunk_tokens) is what it may wait longer for that. A choice, not a measurement.
AFFINITY_TOKENS = 1024

# A decode worker prefills itself only prompts of which it holds more than this: else every prompt shorter than
# max_local_tokens would be its own as soon as it held the first block, which is the same in every chat.
LOCAL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """Where the last turn of a conversation ran; empty: unknown."""

    prefill_worker: str = ""
    decode_worker: str = ""


NOWHERE = Place()


@dataclass(frozen=True, slots=True)
class Demand:
    """A sequence, as far as routing looks at it. `held`: leading prompt tokens that each worker seems to hold (whole
    blocks, less than the prompt); `max_local_tokens`: what a decode worker may compute itself while there are prefill
    workers, 0: nothing; `ttft_s`: the whole promise, of which a part is over (standing.due says when it ends)."""

    num_tokens: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    last: Place = NOWHERE
    max_local_tokens: int = 0
    standing: Standing = UNPROMISED
    ttft_s: float | None = None
    tpot_s: float | None = None


ANY = Demand()


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """What this gateway has with each worker, in tokens: prompts on their way through it, and of those on decode
    workers what they compute themselves and have not computed yet. And what it has sent there since the last beat."""

    in_flight: Mapping[str, int] = field(default_factory=dict)
    prefilling: Mapping[str, int] = field(default_factory=dict)
    heard: Mapping[str, Heard] = field(default_factory=dict)


# (late by so many seconds, no slot left, slower than promised, degraded): the smaller the better.
Tier = tuple[float, bool, bool, bool]


class Costs:
    """Of one sequence, at one moment (`now`: time.monotonic())."""

    __slots__ = (
        "_ahead",
        "_heard",
        "_held",
        "_in_flight",
        "_now",
        "_num_tokens",
        "_predictions",
        "_prefilling",
        "demand",
    )

    def __init__(self, demand: Demand, load: OwnLoad, now: float = 0.0) -> None:
        self.demand = demand
        self._num_tokens = demand.num_tokens
        self._held = demand.held
        self._in_flight = load.in_flight
        self._prefilling = load.prefilling
        self._heard = load.heard
        self._now = now
        self._ahead: dict[str, Ahead] = {}
        self._predictions: dict[tuple[str, int], Prediction | None] = {}

    def held(self, worker: WorkerInfo) -> int:
        return self._held.get(worker.worker_id, 0)

    def wait(self, worker: WorkerInfo) -> int:
        return worker.load.num_waiting_tokens + self._in_flight.get(worker.worker_id, 0)

    def of_prefill(self, worker: WorkerInfo, fetchable: int) -> float:
        """`fetchable`: leading tokens that it may have from a decode worker."""
        held = self.held(worker)
        reach = max(held, fetchable)
        return self.wait(worker) + self._num_tokens - reach + MOVE * (reach - held)

    def of_decode(self, worker: WorkerInfo) -> float:
        return self.wait(worker) + self._num_tokens - self.held(worker)

    def of_local(self, worker: WorkerInfo) -> float:
        waiting = worker.load.num_waiting_tokens + self._prefilling.get(worker.worker_id, 0)
        return waiting + self._num_tokens - self.held(worker) + MOVE * self.of_decode(worker)

    def is_mostly_held(self, worker: WorkerInfo) -> bool:
        """Whether a decode worker holds so much of the prompt that it may compute the rest itself."""
        return self.is_short(worker) and self.held(worker) > LOCAL_SHARE * self._num_tokens

    def is_short(self, worker: WorkerInfo) -> bool:
        """Whether a decode worker may compute what it lacks of the prompt itself, if there is a reason to."""
        return self._num_tokens - self.held(worker) <= self.demand.max_local_tokens

    def is_full(self, worker: WorkerInfo) -> bool:
        """A decode worker that runs as many sequences as it may: another waits for one's end."""
        return 0 < worker.load.max_num_seqs <= worker.load.num_running

    # ------------------------------------------------------------ promises

    @property
    def left_s(self) -> float:
        """Until the first token is due; inf: nothing was promised."""
        return self.demand.standing.due - self._now

    def first_token(self, worker: WorkerInfo, fetchable: int = 0) -> Prediction | None:
        """If it computes the prompt, `fetchable` leading tokens of which it may have from another. None: not known."""
        key = worker.worker_id, fetchable
        if key not in self._predictions:
            need, ahead = self._need(worker, fetchable), self._ahead_at(worker)
            self._predictions[key] = predict(worker.load, ahead, need, self.demand.standing)
        return self._predictions[key]

    def own_s(self, worker: WorkerInfo, load: Load) -> float:
        """What it would take there by the speed that another's load tells."""
        return self._need(worker, 0).seconds(load.speed, load.pass_tokens)

    def retry_after_s(self, worker: WorkerInfo, fetchable: int = 0, most_s: float = math.inf) -> float | None:
        """When it would be in time there, if nothing else came; None: never, or not within most_s, or not known."""
        need, ahead = self._need(worker, fetchable), self._ahead_at(worker)
        return retry_after(worker.load, ahead, need, self.demand.standing, self._now, most_s)

    def _need(self, worker: WorkerInfo, fetchable: int) -> Need:
        held = self.held(worker)
        reach = max(held, fetchable)
        return Need(self._num_tokens - reach, reach, MOVE * (reach - held))

    def _ahead_at(self, worker: WorkerInfo) -> Ahead:
        name = worker.worker_id
        if name not in self._ahead:
            self._ahead[name] = (self._heard.get(name) or Heard(self._now)).ahead(self._now)
        return self._ahead[name]

    def late_s(self, worker: WorkerInfo, fetchable: int = 0) -> float:
        """How much later than promised; 0 where nothing was promised, which is not looked into, or nothing is known."""
        if math.isinf(self.left_s) or (prediction := self.first_token(worker, fetchable)) is None:
            return 0.0
        return max(0.0, prediction.first_token_s - self.left_s)

    def tier_of_prefill(self, worker: WorkerInfo, fetchable: int) -> Tier:
        return self.late_s(worker, fetchable), False, False, worker.status == "degraded"

    def tier_of_decode(self, worker: WorkerInfo) -> Tier:
        load, tpot_s = worker.load, self.demand.tpot_s
        # With one sequence more, a step has one token more.
        slow = tpot_s is not None and load.step_s > 0 and load.step_s + load.speed.token_s > tpot_s
        return 0.0, self.is_full(worker), slow, worker.status == "degraded"

    def tier_of_both(self, worker: WorkerInfo) -> Tier:
        """Of a decode worker that computes the prompt too."""
        late_s, *_ = self.tier_of_prefill(worker, 0)
        _, full, slow, degraded = self.tier_of_decode(worker)
        return late_s, full, slow, degraded

    def why(self, worker: WorkerInfo, last: str) -> str:
        """It was chosen, in words. `last`: the conversation's worker of this role."""
        held = self.held(worker)
        if worker.worker_id == last:
            return f"of the conversation, holds {held} of {self._num_tokens}"
        return f"holds {held} of {self._num_tokens}" if held else "least loaded"


def best(
    workers: Sequence[WorkerInfo],
    tier: Callable[[WorkerInfo], Tier],
    cost: Callable[[WorkerInfo], float],
    keep: str = "",
) -> WorkerInfo:
    """Of the best tier the cheapest; of equals the one with more free blocks, then by name. `keep`, if it is of that
    tier and no more than AFFINITY_TOKENS dearer, comes before."""

    def rank(worker: WorkerInfo) -> tuple[Tier, float, int, str]:
        return tier(worker), cost(worker), -worker.load.free_blocks, worker.worker_id

    chosen = min(workers, key=rank)
    if keep and keep != chosen.worker_id:
        for worker in workers:
            if worker.worker_id == keep and tier(worker) == tier(chosen):
                return worker if cost(worker) <= cost(chosen) + AFFINITY_TOKENS else chosen
    return chosen
