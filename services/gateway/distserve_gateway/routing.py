"""Which workers a sequence goes to: a pure function of the registry's snapshot, of what this gateway has sent, of what
the workers seem to hold of the prompt (costs.py has the formula) and of what it was promised.

Usually a pair, prefill and decode (pairing.py). A decode worker may compute the prompt itself (local_prefill.py). A
colocated one does both phases; it is used where no prefill worker fits, or none is in time.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from distserve.errors import NoWorker
from distserve.messages import WorkerInfo
from distserve_gateway.costs import ANY, Costs, Demand, OwnLoad, best
from distserve_gateway.local_prefill import able, alone, local_prefill
from distserve_gateway.pairing import Pairing
from distserve_gateway.promises import SLACK, unattainable
from distserve_gateway.route import Route

RETRY_AFTER_S = 2.0
USABLE = ("ok", "degraded")  # a degraded worker serves, with reasons why another is better


def choose(
    snapshot: Mapping[str, WorkerInfo],
    model: str,
    load: OwnLoad,
    excluded: Collection[str] = (),
    demand: Demand = ANY,
    now: float = 0.0,
) -> Route:
    """The best route at `now`, time.monotonic(): in time, if that was promised, then cheapest. A degraded worker only
    where no other of its role fits. `excluded`: not these workers, though they are there.

    Raises NoWorker naming the role that is missing, and SloUnattainable where it is plain that every worker is too
    late.
    """
    there = [w for w in snapshot.values() if w.model == model and w.status in USABLE]
    usable = [w for w in there if w.worker_id not in excluded]
    takers = [w for w in usable if w.role == "decode" and not w.colocated]
    colocated = [w for w in usable if w.role == "decode" and w.colocated]
    costs = Costs(demand, load, now)
    pairing = Pairing([w for w in usable if w.role == "prefill"], takers, costs)
    pair = pairing.best()

    options: list[Route] = []
    if (local := local_prefill(takers, pair, costs)) is not None:
        options.append(local)
    if pair is not None:
        options.append(pair.route(costs))
    if colocated and (not options or not math.isinf(costs.left_s)):
        options.append(_colocated(colocated, costs))
    on_its_own = not options and bool(takers) and _lacks_prefill(there)
    if on_its_own:
        options.append(alone(takers, costs, _why_none(there, model)))
    if not options:
        role = "prefill" if takers else "decode"
        why = f"{_why_none(there, model)}, try again later"
        raise NoWorker(why, role=role, model=model, retry_after_s=RETRY_AFTER_S)

    route = min(options, key=lambda option: option.late_s)  # of equals the first
    if demand.ttft_s is not None and route.late_s > SLACK * demand.ttft_s:
        own = colocated + (takers if on_its_own else able(takers, pair, costs))
        raise unattainable(costs, pairing.candidates() + [(d, 0) for d in own], demand.ttft_s)
    return route


def _colocated(workers: Sequence[WorkerInfo], costs: Costs) -> Route:
    last = costs.demand.last.decode_worker
    worker = best(workers, costs.tier_of_both, costs.of_decode, last)
    num_uncached = costs.demand.num_tokens - costs.held(worker)
    reason = f"colocated, {costs.why(worker, last)}"
    return Route(None, worker.worker_id, "", "colocated", num_uncached, reason, costs.late_s(worker))


def _lacks_prefill(there: Sequence[WorkerInfo]) -> bool:
    """No prefill worker fits a decode worker: one that has refused is there all the same."""
    layouts = [w.layout for w in there if w.role == "decode" and not w.colocated]
    return not any(w.role == "prefill" and w.layout in layouts for w in there)


def _why_none(there: Sequence[WorkerInfo], model: str) -> str:
    roles = {w.role for w in there}
    if "decode" not in roles:
        return f"no decode worker for model {model!r} is ready"
    if "prefill" not in roles:
        return f"no prefill worker for model {model!r} is ready"
    if _lacks_prefill(there):
        return f"no prefill worker for model {model!r} has the KV layout of a decode worker"
    return f"no worker for model {model!r} is left to ask"


def context_length(snapshot: Mapping[str, WorkerInfo], model: str, default: int) -> int:
    """The longest sequence, in tokens, that every worker of the model takes; `default` while there is none."""
    limits = [w.max_model_len for w in snapshot.values() if w.model == model and w.max_model_len > 0]
    return min(limits, default=default)
