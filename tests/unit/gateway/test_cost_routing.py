"""Routing by what workers hold: pure tables. (test_routing.py has what holds nothing.)"""

import random

import pytest

from distserve.messages import WorkerInfo
from distserve_gateway.costs import AFFINITY_TOKENS, Demand, OwnLoad, Place
from distserve_gateway.route import Route
from distserve_gateway.routing import choose
from tests.unit.gateway.test_routing import worker

P1, P2, D1, D2 = worker("p1"), worker("p2"), worker("d1"), worker("d2")


def route(
    *workers: WorkerInfo,
    num_tokens: int = 2000,
    held: dict[str, int] | None = None,
    last: Place = Place(),
    in_flight: dict[str, int] | None = None,
    prefilling: dict[str, int] | None = None,
    local: int = 0,
) -> Route:
    demand = Demand(num_tokens, held or {}, last, local)
    return choose({w.worker_id: w for w in workers}, "tiny", OwnLoad(in_flight or {}, prefilling or {}), (), demand)


def test_the_prefix_attracts_on_both_sides() -> None:
    found = route(P1, P2, D1, D2, held={"p2": 1600, "d2": 1600})
    assert found == Route("p2", "d2")
    assert found.num_uncached == 400
    assert "prefill holds 1600 of 2000" in found.reason


def test_a_queue_as_long_as_what_is_saved_sends_it_elsewhere() -> None:
    """Computed elsewhere it costs 1600 more: the prefix is worth that much of a queue, and no more."""
    assert route(P1, P2, D1, held={"p2": 1600}, in_flight={"p2": 1599}).prefill_worker == "p2"
    assert route(P1, P2, D1, held={"p2": 1600}, in_flight={"p2": 1601}).prefill_worker == "p1"
    assert route(P1, D1, D2, held={"d2": 1600}, in_flight={"d2": 1599}).decode_worker == "d2"
    assert route(P1, D1, D2, held={"d2": 1600}, in_flight={"d2": 1601}).decode_worker == "d1"


def test_what_prefill_can_fetch_it_need_not_compute() -> None:
    """Of 1600 tokens at a decode worker: fetched they cost a tenth, so a prefill worker's own 1600 are worth 160."""
    held = {"p2": 1600, "d1": 1600}
    assert route(P1, P2, D1, held=held, in_flight={"p2": 159}) == Route("p2", "d1")
    found = route(P1, P2, D1, held=held, in_flight={"p2": 161})
    assert found == Route("p1", "d1", holder="d1")
    assert found.num_uncached == 400


def test_the_holder_is_the_decode_worker_with_most_if_prefill_has_less() -> None:
    assert route(P1, D1, D2, held={"d1": 160, "d2": 480}, in_flight={"d2": 5000}) == Route("p1", "d1", holder="d2")
    assert route(P1, D1, D2, held={"d1": 480, "d2": 480}, in_flight={"d1": 1}) == Route("p1", "d2", holder="d2")
    assert route(P1, D1, D2, held={"p1": 480, "d2": 480}) == Route("p1", "d2")
    assert route(P1, D1, D2, held={"p1": 464, "d2": 480}) == Route("p1", "d2", holder="d2")
    assert route(P1, D1, D2) == Route("p1", "d1")


def test_holders_have_the_layout_of_the_pair() -> None:
    other = worker("d2", dtype="bfloat16")
    assert route(P1, D1, other, held={"d2": 1984}) == Route("p1", "d1")


def test_a_degraded_worker_does_not_attract_by_what_it_holds() -> None:
    poor = worker("p2", status="degraded")
    assert route(P1, poor, D1, held={"p2": 1984}, last=Place("p2", "d1")) == Route("p1", "d1")


@pytest.mark.parametrize(
    ("num_tokens", "held", "local", "kind"),
    [
        (2000, {"d1": 1744}, 256, "local"),
        (2000, {"d1": 1728}, 256, "pair"),  # 272 left to compute
        (2000, {"d1": 1744}, 255, "pair"),
        (2000, {"d1": 1984}, 0, "pair"),
        (200, {"d1": 112}, 256, "local"),
        (200, {"d1": 96}, 256, "pair"),  # less than half: the head of every chat is no reason
        (200, {}, 256, "pair"),
        (2000, {"d1": 1744, "p1": 1744}, 256, "local"),  # nothing travels
        (2000, {"d1": 1744, "p1": 1984}, 256, "pair"),  # 16 tokens and a transfer are less than 256
    ],
)
def test_a_decode_worker_that_holds_all_but_few_tokens_prefills_itself(
    num_tokens: int, held: dict[str, int], local: int, kind: str
) -> None:
    found = route(P1, D1, num_tokens=num_tokens, held=held, local=local)
    assert found.kind == kind
    assert (found.prefill_worker, found.decode_worker) == (None if kind == "local" else "p1", "d1")
    if kind == "local":
        assert found.holder == ""
        assert found.num_uncached == num_tokens - held["d1"]
        assert found.reason == f"local prefill: decode holds {held['d1']} of {num_tokens} prompt tokens"


def test_of_several_the_cheapest_prefills_itself() -> None:
    held = {"d1": 1904, "d2": 1904}
    assert route(P1, D1, D2, held=held, local=256, prefilling={"d1": 5}) == Route(None, "d2")
    assert route(P1, D1, D2, held=held, local=256, in_flight={"d2": 5}) == Route(None, "d1")
    assert route(P1, D1, D2, held=held, local=256, last=Place("", "d2")) == Route(None, "d2")


def test_local_prefill_stops_where_decode_has_enough_to_compute() -> None:
    """96 tokens by the pair cost 96, a fetch of 1904 (190) and a transfer of 96 (10) here."""
    held = {"d1": 1904}
    assert route(P1, D1, held=held, local=256, prefilling={"d1": 180}).kind == "local"
    assert route(P1, D1, held=held, local=256, prefilling={"d1": 200}).kind == "pair"
    assert route(P1, D1, D2, held=held, local=256, in_flight={"d1": 50_000}) == Route("p1", "d2", holder="d1")


def test_local_prefill_serves_where_no_prefill_worker_is_there() -> None:
    assert route(D1, held={"d1": 1984}, local=256) == Route(None, "d1")


def test_a_degraded_decode_worker_prefills_itself_only_where_no_other_is() -> None:
    poor = worker("d1", status="degraded")
    assert route(P1, poor, D2, held={"d1": 1984}, local=256).decode_worker == "d2"
    assert route(P1, poor, held={"d1": 1984}, local=256) == Route(None, "d1")


def test_a_conversation_stays_where_it_was_until_that_is_overloaded() -> None:
    last = Place("p2", "d2")
    assert route(P1, P2, D1, D2, last=last) == Route("p2", "d2")
    much = {"p2": AFFINITY_TOKENS, "d2": AFFINITY_TOKENS}
    found = route(P1, P2, D1, D2, last=last, in_flight=much)
    assert found == Route("p2", "d2")
    assert "of the conversation" in found.reason
    more = {"p2": AFFINITY_TOKENS + 1, "d2": AFFINITY_TOKENS + 1}
    assert route(P1, P2, D1, D2, last=last, in_flight=more) == Route("p1", "d1")


def test_a_conversation_whose_workers_are_gone_goes_by_load() -> None:
    assert route(P1, D1, last=Place("p2", "d2")) == Route("p1", "d1")
    draining = worker("d2", status="draining")
    assert route(P1, D1, draining, last=Place("p1", "d2"), held={"d2": 1984}, local=256) == Route("p1", "d1")


def test_a_colocated_worker_is_chosen_by_what_it_holds_too() -> None:
    workers = worker("d1", colocated=True), worker("d2", colocated=True)
    found = route(*workers, held={"d2": 160}, in_flight={"d2": 159}, local=256)
    assert found == Route(None, "d2")
    assert found.kind == "colocated"
    assert route(*workers, held={"d2": 160}, in_flight={"d2": 161}) == Route(None, "d1")
    assert route(*workers, last=Place("", "d2")) == Route(None, "d2")


@pytest.mark.parametrize("local", [0, 256])
def test_a_hot_prefix_does_not_pull_everything_to_one_worker(local: int) -> None:
    """Everyone has the same 1600 tokens of 1800, which lie on one pair. Nothing ends meanwhile."""
    workers = [worker(f"{role}{i}") for role in "pd" for i in range(4)]
    in_flight: dict[str, int] = {}
    prefilling: dict[str, int] = {}
    for _ in range(200):
        found = route(
            *workers,
            num_tokens=1800,
            held={"p0": 1600, "d0": 1600},
            in_flight=in_flight,
            prefilling=prefilling,
            local=local,
        )
        if found.prefill_worker:
            in_flight[found.prefill_worker] = in_flight.get(found.prefill_worker, 0) + found.num_uncached
        else:
            prefilling[found.decode_worker] = prefilling.get(found.decode_worker, 0) + found.num_uncached
        in_flight[found.decode_worker] = in_flight.get(found.decode_worker, 0) + 1800
    for role in "pd":
        shares = [in_flight.get(f"{role}{i}", 0) for i in range(4)]
        assert min(shares) > 0.5 * max(shares), shares


@pytest.mark.parametrize("seed", range(100))
def test_no_other_pair_is_cheaper_without_affinity(seed: int) -> None:
    draw = random.Random(seed)
    workers = [worker(f"{role}{i}", waiting=draw.randrange(500)) for role in "pd" for i in range(4)]
    held = {w.worker_id: draw.randrange(60) * 16 for w in workers}
    found = route(*workers, num_tokens=1000, held=held)
    reach = max(held[w.worker_id] for w in workers if w.role == "decode")

    def of_prefill(w: WorkerInfo) -> float:
        own = held[w.worker_id]
        return w.load.num_waiting_tokens + 1000 - max(own, reach) + 0.1 * max(0, reach - own)

    def of_decode(w: WorkerInfo) -> float:
        return w.load.num_waiting_tokens + 1000 - held[w.worker_id]

    assert found.prefill_worker == min((w for w in workers if w.role == "prefill"), key=of_prefill).worker_id
    assert found.decode_worker == min((w for w in workers if w.role == "decode"), key=of_decode).worker_id
