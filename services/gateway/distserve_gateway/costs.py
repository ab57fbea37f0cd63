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
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distserve.messages import WorkerInfo

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
    blocks, less than the prompt); `max_local_tokens`: what a decode worker may compute itself, 0: nothing."""

    num_tokens: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    last: Place = NOWHERE
    max_local_tokens: int = 0


ANY = Demand()


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """What this gateway has with each worker, in tokens: prompts on their way through it, and of those on decode
    workers what they compute themselves and have not computed yet."""

    in_flight: Mapping[str, int] = field(default_factory=dict)
    prefilling: Mapping[str, int] = field(default_factory=dict)


class Costs:
    """Of one sequence, at one moment."""

    __slots__ = ("_held", "_in_flight", "_num_tokens", "_prefilling", "demand")

    def __init__(self, demand: Demand, load: OwnLoad) -> None:
        self.demand = demand
        self._num_tokens = demand.num_tokens
        self._held = demand.held
        self._in_flight = load.in_flight
        self._prefilling = load.prefilling

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

    def may_prefill(self, worker: WorkerInfo) -> bool:
        """Whether a decode worker holds so much of the prompt that it may compute the rest itself."""
        held = self.held(worker)
        return self._num_tokens - held <= self.demand.max_local_tokens and held > LOCAL_SHARE * self._num_tokens


def best(workers: Sequence[WorkerInfo], cost: Callable[[WorkerInfo], float], keep: str = "") -> WorkerInfo:
    """The cheapest; of equals the one with more free blocks, then by name. A degraded one only where there is no
    other. `keep`, if it is among them and no more than AFFINITY_TOKENS dearer, comes before."""

    def rank(worker: WorkerInfo) -> tuple[bool, float, int, str]:
        return worker.status == "degraded", cost(worker), -worker.load.free_blocks, worker.worker_id

    chosen = min(workers, key=rank)
    if keep and keep != chosen.worker_id:
        for worker in workers:
            if worker.worker_id == keep and worker.status == chosen.status:
                return worker if cost(worker) <= cost(chosen) + AFFINITY_TOKENS else chosen
    return chosen
