"""The best prefill worker and the best decode worker for it: of the same model, with KV that means the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distserve.messages import KVLayout, WorkerInfo
from distserve_gateway.costs import MOVE, Costs, best
from distserve_gateway.route import Route


@dataclass(frozen=True, slots=True)
class Pair:
    """`source`: the possible partner of `prefill` that holds most of the prompt, `decode` itself if none holds more:
    prefill may fetch so many leading tokens, `fetchable`. `cost` as costs.py has it."""

    prefill: WorkerInfo
    decode: WorkerInfo
    source: WorkerInfo
    fetchable: int
    cost: float

    def route(self, costs: Costs) -> Route:
        """Its source is the holder, if that holds more than prefill has itself."""
        prefill, decode, last = self.prefill, self.decode, costs.demand.last
        held = costs.held(prefill)
        return Route(
            prefill.worker_id,
            decode.worker_id,
            self.source.worker_id if self.fetchable > held else "",
            "pair",
            costs.demand.num_tokens - max(held, self.fetchable),
            f"prefill {costs.why(prefill, last.prefill_worker)}, decode {costs.why(decode, last.decode_worker)}",
            costs.late_s(prefill, self.fetchable),
        )


class Pairing:
    """All pairs of these workers. The best one is the best prefill worker that has a partner, and the best of its
    partners."""

    def __init__(self, prefills: Sequence[WorkerInfo], takers: Sequence[WorkerInfo], costs: Costs) -> None:
        self._partners: dict[KVLayout | None, list[WorkerInfo]] = {}
        for taker in takers:
            self._partners.setdefault(taker.layout, []).append(taker)
        self._prefills = [p for p in prefills if p.layout in self._partners]
        self._sources: Mapping[KVLayout | None, WorkerInfo] = {
            layout: max(group, key=costs.held) for layout, group in self._partners.items()
        }
        self._costs = costs

    def best(self) -> Pair | None:
        """None: there is no pair."""
        costs, last = self._costs, self._costs.demand.last
        if not self._prefills:
            return None
        prefill = best(
            self._prefills,
            lambda p: costs.tier_of_prefill(p, self._fetchable(p)),
            lambda p: costs.of_prefill(p, self._fetchable(p)),
            last.prefill_worker,
        )
        decode = best(self._partners[prefill.layout], costs.tier_of_decode, costs.of_decode, last.decode_worker)
        fetchable = self._fetchable(prefill)
        return Pair(
            prefill,
            decode,
            decode if costs.held(decode) == fetchable else self._sources[prefill.layout],
            fetchable,
            costs.of_prefill(prefill, fetchable) + MOVE * costs.of_decode(decode),
        )

    def candidates(self) -> list[tuple[WorkerInfo, int]]:
        """Each prefill worker that has a partner, and how many leading tokens of the prompt it may fetch."""
        return [(p, self._fetchable(p)) for p in self._prefills]

    def _fetchable(self, prefill: WorkerInfo) -> int:
        return self._costs.held(self._sources[prefill.layout])
