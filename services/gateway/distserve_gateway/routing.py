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
from distserve_gateway.costs import ANY, MOVE, Costs, Demand, OwnLoad, best

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
    load: OwnLoad,
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
    pair = _pair(paired, partners, costs) if paired else None
    local = _local(takers, pair, costs) if demand.held and demand.max_local_tokens else None
    if local is not None:
        return local
    if pair is not None:
        return _pair_route(pair, costs)
    colocated = [d for d in decodes if d.colocated]
    if colocated:
        worker = best(colocated, costs.of_decode, demand.last.decode_worker)
        reason = f"colocated, {_why(worker, costs, demand.last.decode_worker)}"
        return Route(None, worker.worker_id, "", "colocated", demand.num_tokens - costs.held(worker), reason)
    role = "decode" if not decodes else "prefill"
    why = f"no {role} worker for model {model!r} is ready"
    if prefills and takers:
        why = f"no prefill worker for model {model!r} has the KV layout of a decode worker"
    raise NoWorker(f"{why}, try again later", role=role, model=model, retry_after_s=RETRY_AFTER_S)


@dataclass(frozen=True, slots=True)
class _Pair:
    """`source`: the possible partner of `prefill` that holds most of the prompt, `decode` itself if none holds more."""

    prefill: WorkerInfo
    decode: WorkerInfo
    source: WorkerInfo


def _pair(prefills: Sequence[WorkerInfo], partners: Mapping[KVLayout | None, list[WorkerInfo]], costs: Costs) -> _Pair:
    last = costs.demand.last
    sources = {layout: max(group, key=costs.held) for layout, group in partners.items()}
    fetchable = {layout: costs.held(source) for layout, source in sources.items()}
    prefill = best(prefills, lambda p: costs.of_prefill(p, fetchable[p.layout]), last.prefill_worker)
    decode = best(partners[prefill.layout], costs.of_decode, last.decode_worker)
    most = costs.held(decode) == fetchable[prefill.layout]
    return _Pair(prefill, decode, decode if most else sources[prefill.layout])


def _pair_route(pair: _Pair, costs: Costs) -> Route:
    """Its source is the holder, if that holds more than prefill has itself."""
    prefill, decode, last = pair.prefill, pair.decode, costs.demand.last
    held, fetchable = costs.held(prefill), costs.held(pair.source)
    return Route(
        prefill.worker_id,
        decode.worker_id,
        pair.source.worker_id if fetchable > held else "",
        "pair",
        costs.demand.num_tokens - max(held, fetchable),
        f"prefill {_why(prefill, costs, last.prefill_worker)}, decode {_why(decode, costs, last.decode_worker)}",
    )


def _local(takers: Sequence[WorkerInfo], pair: _Pair | None, costs: Costs) -> Route | None:
    """A decode worker that prefills itself, where one may and where that is no dearer than the best pair."""
    able = [d for d in takers if costs.may_prefill(d)]
    if not able:
        return None
    worker = best(able, costs.of_local, keep=costs.demand.last.decode_worker)
    if pair is not None:
        if worker.status == "degraded" != pair.decode.status:
            return None
        of_pair = costs.of_prefill(pair.prefill, costs.held(pair.source)) + MOVE * costs.of_decode(pair.decode)
        if costs.of_local(worker) > of_pair:
            return None
    held, num_tokens = costs.held(worker), costs.demand.num_tokens
    reason = f"local prefill: decode holds {held} of {num_tokens} prompt tokens"
    return Route(None, worker.worker_id, "", "local", num_tokens - held, reason)


def _why(worker: WorkerInfo, costs: Costs, last: str) -> str:
    held, num_tokens = costs.held(worker), costs.demand.num_tokens
    if worker.worker_id == last:
        return f"of the conversation, holds {held} of {num_tokens}"
    return f"holds {held} of {num_tokens}" if held else "least loaded"


def context_length(snapshot: Mapping[str, WorkerInfo], model: str, default: int) -> int:
    """The longest sequence, in tokens, that every worker of the model takes; `default` while there is none."""
    limits = [w.max_model_len for w in snapshot.values() if w.model == model and w.max_model_len > 0]
    return min(limits, default=default)
