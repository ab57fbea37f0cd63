"""Which workers a sequence goes to: a pure function of the registry's snapshot and of what this gateway has sent.

A pair is a prefill and a decode worker of the same model whose KV means the same (equal layout). A colocated decode
worker does both phases; it is used where no prefill worker fits.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distserve.errors import NoWorker
from distserve.messages import KVLayout, WorkerInfo

RETRY_AFTER_S = 2.0
USABLE = ("ok", "degraded")  # a degraded worker serves, with reasons why another is better


@dataclass(frozen=True, slots=True)
class Route:
    prefill_worker: str | None  # None: the decode worker does both phases
    decode_worker: str


def choose(
    snapshot: Mapping[str, WorkerInfo],
    model: str,
    in_flight: Mapping[str, int],
    excluded: Collection[str] = (),
) -> Route:
    """The least loaded pair; a degraded worker only where no other of its role fits. `in_flight`: tokens that this
    gateway has with each worker; `excluded`: not these.

    Raises NoWorker naming the role that is missing.
    """
    usable = [w for w in snapshot.values() if w.model == model and w.status in USABLE and w.worker_id not in excluded]
    prefills = [w for w in usable if w.role == "prefill"]
    decodes = [w for w in usable if w.role == "decode"]
    takers = [d for d in decodes if not d.colocated]

    def load(worker: WorkerInfo) -> tuple[bool, int, int, str]:
        waiting = worker.load.num_waiting_tokens + in_flight.get(worker.worker_id, 0)
        return worker.status == "degraded", waiting, -worker.load.free_blocks, worker.worker_id

    # The least loaded pair is the least loaded prefill worker that has a partner, and the least loaded of its partners.
    partners: dict[KVLayout | None, list[WorkerInfo]] = {}
    for taker in takers:
        partners.setdefault(taker.layout, []).append(taker)
    paired = [p for p in prefills if p.layout in partners]
    if paired:
        prefill = min(paired, key=load)
        return Route(prefill.worker_id, min(partners[prefill.layout], key=load).worker_id)
    colocated = [d for d in decodes if d.colocated]
    if colocated:
        return Route(None, min(colocated, key=load).worker_id)
    role = "decode" if not decodes else "prefill"
    why = f"no {role} worker for model {model!r} is ready"
    if prefills and takers:
        why = f"no prefill worker for model {model!r} has the KV layout of a decode worker"
    raise NoWorker(f"{why}, try again later", role=role, model=model, retry_after_s=RETRY_AFTER_S)


def context_length(snapshot: Mapping[str, WorkerInfo], model: str, default: int) -> int:
    """The longest sequence, in tokens, that every worker of the model takes; `default` while there is none."""
    limits = [w.max_model_len for w in snapshot.values() if w.model == model and w.max_model_len > 0]
    return min(limits, default=default)
