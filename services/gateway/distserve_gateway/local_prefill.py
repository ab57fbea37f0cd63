"""When a decode worker computes a prompt itself although that is prefill's part: a pure function, with its reason.

    local    it holds most of the prompt, and the rest is short: cheaper than to move what it holds
    spill    what it lacks is short, and prefill is behind: the first token comes sooner from here
    alone    no prefill worker is there: any prompt, in chunks beside the steps of those that run

Short is at most decode.max_local_prefill_tokens; with 0 there is no local and no spill. `alone` does not ask for it:
the other choice would be no answer.
"""

from collections.abc import Sequence

from distserve.messages import WorkerInfo
from distserve_gateway.costs import Costs, best
from distserve_gateway.pairing import Pair
from distserve_gateway.route import Kind, Route


def local_prefill(takers: Sequence[WorkerInfo], pair: Pair | None, costs: Costs) -> Route | None:
    """`pair`: the best one, None if there is none just now. None: it is prefill's."""
    if not costs.demand.max_local_tokens:
        return None
    return _local(takers, pair, costs) or (_spill(takers, pair, costs) if pair is not None else None)


def able(takers: Sequence[WorkerInfo], pair: Pair | None, costs: Costs) -> list[WorkerInfo]:
    """Those that might compute it themselves for one reason or another, if they are in time."""
    is_meant = costs.is_mostly_held if pair is None else costs.is_short
    return [d for d in takers if is_meant(d) and _may(d, pair, costs)]


def alone(takers: Sequence[WorkerInfo], costs: Costs, why: str) -> Route:
    """On one of these (at least one) decode workers, since there is no prefill worker: `why`."""
    worker = best(takers, costs.tier_of_both, costs.of_local, costs.demand.last.decode_worker)
    return _route("alone", worker, costs, f"{why}: decode prefills itself")


def _local(takers: Sequence[WorkerInfo], pair: Pair | None, costs: Costs) -> Route | None:
    """Where that is no dearer than the best pair."""
    holding = [d for d in takers if costs.is_mostly_held(d) and _may(d, pair, costs)]
    if not holding:
        return None
    worker = best(holding, costs.tier_of_both, costs.of_local, costs.demand.last.decode_worker)
    if pair is not None and costs.of_local(worker) > pair.cost:
        return None
    held, num_tokens = costs.held(worker), costs.demand.num_tokens
    return _route("local", worker, costs, f"local prefill: decode holds {held} of {num_tokens} prompt tokens")


def _spill(takers: Sequence[WorkerInfo], pair: Pair, costs: Costs) -> Route | None:
    """Where prefill has others before it, or is too late, and decode would be sooner."""
    if not (short := able(takers, pair, costs)):
        return None
    by_pair = costs.first_token(pair.prefill, pair.fetchable)
    if by_pair is None or not (by_pair.wait_s or costs.late_s(pair.prefill, pair.fetchable)):
        return None
    worker = best(short, costs.tier_of_both, costs.of_local, costs.demand.last.decode_worker)
    # One that computed no prompt lately tells no speed of its own: prefill's is taken, and soon it knows.
    here = costs.first_token(worker)
    here_s = costs.own_s(worker, pair.prefill.load) if here is None else here.first_token_s
    if here_s >= by_pair.first_token_s:
        return None
    reason = (
        f"local prefill: prefill is behind, first token in {by_pair.first_token_s:.3f} s there, {here_s:.3f} s here"
    )
    return _route("spill", worker, costs, reason)


def _may(worker: WorkerInfo, pair: Pair | None, costs: Costs) -> bool:
    """It has a slot left, and is as well as the pair's decode worker."""
    is_worse = pair is not None and worker.status == "degraded" != pair.decode.status
    return not is_worse and not costs.is_full(worker)


def _route(kind: Kind, worker: WorkerInfo, costs: Costs, reason: str) -> Route:
    num_uncached = costs.demand.num_tokens - costs.held(worker)
    return Route(None, worker.worker_id, "", kind, num_uncached, reason, costs.late_s(worker))
