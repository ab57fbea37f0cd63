"""Which workers a sequence goes to: a pure function of the registry's snapshot, of what this gateway has sent, and of
what the workers seem to hold of the prompt (costs.py has the formula).

A pair is a prefill and a decode worker of the same model whose KV means the same (equal layout). A decode worker that
holds all but few tokens of the prompt prefills those itself. A colocated decode worker does both phases; it is used
where no prefill worker fits.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from distserve.errors import NoWorker
from distserve.messages import KVLayout, WorkerInfo
from distserve_gateway.costs import ANY, MOVE, NOWHERE, Costs, Demand, Load, best

RETRY_AFTER_S = 2.0
USABLE = ("ok", "degraded")  # a degraded worker serves, with reasons why another is better

Kind = Literal["pair", "local", "colocated"]


@dataclass(frozen=True, slots=True)
class Route:
    """`holder`: a decode worker that prefill may fetch a prefix from, or empty. `reason`: in words, for people."""

    prefill_worker: str | None  # None: the decode worker does both phases
    decode_worker: str
    holder: str = ""
    kind: Kind = field(default="pair", compare=False)
    num_uncached: int = field(default=0, compare=False)  # prompt tokens to compute, as far as is known
    reason: str = field(default="", compare=False)

    @property
    def first_worker(self) -> str:
        """Who is asked."""
        return self.prefill_worker or self.decode_worker


def choose(
    snapshot: Mapping[str, WorkerInfo],
    model: str,
    load: Load,
    excluded: Collection[str] = (),
    demand: Demand = ANY,
) -> Route:
    """The cheapest route; a degraded worker only where no other of its role fits. `excluded`: not these workers.

    Raises NoWorker naming the role that is missing.
    """
    usable = [w for w in snapshot.values() if w.model == model and w.status in USABLE and w.worker_id not in excluded]
    prefills = [w for w in usable if w.role == "prefill"]
    decodes = [w for w in usable if w.role == "decode"]
    takers = [d for d in decodes if not d.colocated]
    costs = Costs(demand, load)

    # The cheapest pair is the cheapest prefill worker that has a partner, and the cheapest of its partners.
    partners: dict[KVLayout | None, list[WorkerInfo]] = {}
    for taker in takers:
        partners.setdefault(taker.layout, []).append(taker)
    paired = [p for p in prefills if p.layout in partners]
    pair = _pair(paired, partners, costs, demand) if paired else None
    local = _local(takers, pair, costs, demand) if demand.held and demand.max_local_tokens else None
    if local is not None:
        return local
    if pair is not None:
        return _pair_route(*pair, partners[pair[0].layout], costs, demand)
    colocated = [d for d in decodes if d.colocated]
    if colocated:
        worker = best(colocated, costs.of_decode if demand.held else costs.wait, demand.last.decode_worker)
        held = costs.held(worker)
        reason = f"colocated, {_why(worker, held, demand, demand.last.decode_worker)}"
        return Route(None, worker.worker_id, "", "colocated", demand.num_tokens - held, reason)
    role = "decode" if not decodes else "prefill"
    why = f"no {role} worker for model {model!r} is ready"
    if prefills and takers:
        why = f"no prefill worker for model {model!r} has the KV layout of a decode worker"
    raise NoWorker(f"{why}, try again later", role=role, model=model, retry_after_s=RETRY_AFTER_S)


def _pair(
    prefills: Sequence[WorkerInfo],
    partners: Mapping[KVLayout | None, list[WorkerInfo]],
    costs: Costs,
    demand: Demand,
) -> tuple[WorkerInfo, WorkerInfo]:
    last = demand.last
    if not demand.held:
        prefill = best(prefills, costs.wait, last.prefill_worker)
        return prefill, best(partners[prefill.layout], costs.wait, last.decode_worker)
    fetchable = {layout: max(costs.held(d) for d in group) for layout, group in partners.items()}
    prefill = best(prefills, lambda p: costs.of_prefill(p, fetchable[p.layout]), last.prefill_worker)
    return prefill, best(partners[prefill.layout], costs.of_decode, last.decode_worker)


def _pair_route(
    prefill: WorkerInfo, decode: WorkerInfo, group: Sequence[WorkerInfo], costs: Costs, demand: Demand
) -> Route:
    """With the partner that holds most of the prompt as holder, if that is more than prefill has itself."""
    last = demand.last
    if not demand.held and last is NOWHERE:
        return Route(prefill.worker_id, decode.worker_id, "", "pair", demand.num_tokens, "least loaded")
    held = costs.held(prefill)
    holder, reach = "", held
    most = max(group, key=lambda d: (costs.held(d), d is decode))
    if costs.held(most) > held:
        holder, reach = most.worker_id, costs.held(most)
    reason = (
        f"prefill {_why(prefill, held, demand, last.prefill_worker)}, "
        f"decode {_why(decode, costs.held(decode), demand, last.decode_worker)}"
    )
    return Route(prefill.worker_id, decode.worker_id, holder, "pair", demand.num_tokens - reach, reason)


def _local(
    takers: Sequence[WorkerInfo], pair: tuple[WorkerInfo, WorkerInfo] | None, costs: Costs, demand: Demand
) -> Route | None:
    """A decode worker that prefills itself, where one may and where that is no dearer than the best pair."""
    able = [d for d in takers if costs.may_prefill(d, demand.max_local_tokens)]
    if not able:
        return None
    worker = best(able, costs.of_local, keep=demand.last.decode_worker)
    if pair is not None:
        prefill, decode = pair
        if worker.status == "degraded" != decode.status:
            return None
        fetchable = max(costs.held(d) for d in takers if d.layout == prefill.layout)
        if costs.of_local(worker) > costs.of_prefill(prefill, fetchable) + MOVE * costs.of_decode(decode):
            return None
    held = costs.held(worker)
    reason = f"local prefill: decode holds {held} of {demand.num_tokens} prompt tokens"
    return Route(None, worker.worker_id, "", "local", demand.num_tokens - held, reason)


def _why(worker: WorkerInfo, held: int, demand: Demand, last: str) -> str:
    if worker.worker_id == last:
        return f"of the conversation, holds {held} of {demand.num_tokens}"
    return f"holds {held} of {demand.num_tokens}" if held else "least loaded"


def context_length(snapshot: Mapping[str, WorkerInfo], model: str, default: int) -> int:
    """The longest sequence, in tokens, that every worker of the model takes; `default` while there is none."""
    limits = [w.max_model_len for w in snapshot.values() if w.model == model and w.max_model_len > 0]
    return min(limits, default=default)
