"""When a decode worker computes a prompt itself: pure tables. (test_cost_routing.py: those that it mostly holds.)"""

import math

import pytest

from distserve.errors import NoWorker
from distserve.messages import Backlog, PassSpeed, WorkerInfo
from distserve_gateway.costs import Demand, OwnLoad, Place
from distserve_gateway.predicting import Heard, Sent
from distserve_gateway.route import Route
from distserve_gateway.routing import choose
from tests.unit.gateway.test_routing import worker

SPEED = PassSpeed(pass_s=0.01, token_s=0.001)
P1 = worker("p1", speed=SPEED, pass_tokens=1000)
D1, D2 = (worker(name, speed=SPEED, pass_tokens=256) for name in ("d1", "d2"))


def busy(worker_id: str, wait_s: float) -> WorkerInfo:
    steps = [Backlog(math.inf, "normal", wait_s)]
    return worker(worker_id, speed=SPEED, pass_tokens=1000, waiting=int(wait_s * 1000), backlog=steps)


def behind(wait_s: float) -> WorkerInfo:
    return busy("p1", wait_s)


def route(
    *workers: WorkerInfo,
    num_tokens: int = 200,
    held: dict[str, int] | None = None,
    last: Place = Place(),
    local: int = 256,
    heard: dict[str, Heard] | None = None,
    excluded: tuple[str, ...] = (),
) -> Route:
    demand = Demand(num_tokens, held or {}, last, local)
    return choose({w.worker_id: w for w in workers}, "tiny", OwnLoad(heard=heard or {}), excluded, demand)


@pytest.mark.parametrize(
    ("wait_s", "num_tokens", "held", "local", "kind"),
    [
        (0.0, 200, {}, 256, "pair"),  # prefill is not behind: nobody's steps are held up
        (0.5, 200, {}, 256, "spill"),
        (0.5, 256, {}, 256, "spill"),
        (0.5, 257, {}, 256, "pair"),  # longer than a decode worker may compute
        (0.5, 400, {"d1": 160}, 256, "spill"),  # less than half is held, and 240 are left
        (0.5, 200, {}, 0, "pair"),
        (0.5, 200, {}, 199, "pair"),
    ],
)
def test_a_short_prompt_spills_to_decode_while_prefill_is_behind(
    wait_s: float, num_tokens: int, held: dict[str, int], local: int, kind: str
) -> None:
    found = route(behind(wait_s), D1, num_tokens=num_tokens, held=held, local=local)
    assert found.kind == kind
    assert (found.prefill_worker, found.decode_worker) == (None if kind == "spill" else "p1", "d1")
    if kind == "spill":
        assert found.num_uncached == num_tokens - sum(held.values())
        assert found.reason.startswith("local prefill: prefill is behind, first token in ")


def test_the_reason_names_both_times() -> None:
    found = route(behind(0.5), D1)
    assert "first token in 0.710 s there, 0.210 s here" in found.reason


def test_it_does_not_spill_where_that_is_no_sooner() -> None:
    assert route(behind(0.5), busy("d1", 0.5)).kind == "pair"
    assert route(behind(0.51), busy("d1", 0.5)).kind == "spill"
    slow = worker("d1", speed=PassSpeed(token_s=0.01), pass_tokens=256)
    assert route(behind(0.5), slow).kind == "pair"


def test_what_this_gateway_has_just_sent_is_a_queue_too() -> None:
    sent = [Sent(0.0, work_s=1.0, due=4.0)]
    assert route(P1, D1, heard={"p1": Heard(0.0, sent)}).kind == "spill"
    assert route(behind(0.5), D1, heard={"d1": Heard(0.0, sent)}).kind == "pair"


def test_it_does_not_spill_to_a_full_worker_or_a_degraded_one() -> None:
    assert route(behind(0.5), worker("d1", speed=SPEED, num_running=4, max_num_seqs=4)).kind == "pair"
    degraded = worker("d1", status="degraded", speed=SPEED)
    assert route(behind(0.5), degraded, D2) == Route(None, "d2")
    assert route(behind(0.5), degraded, busy("d2", 9.0)) == Route("p1", "d2")
    assert route(behind(0.5), degraded) == Route(None, "d1")  # which a prefill worker would hand over to as well


def test_a_decode_worker_that_has_computed_nothing_yet_is_taken_to_be_as_fast_as_prefill() -> None:
    found = route(behind(0.5), worker("d1"))
    assert found.kind == "spill"
    assert "first token in 0.710 s there, 0.210 s here" in found.reason
    assert route(worker("p1"), worker("d1")).kind == "pair"  # nor has prefill


def test_of_several_the_cheapest_takes_what_spills() -> None:
    sent = [Sent(0.0, work_s=0.01, due=4.0)]
    found = route(behind(0.5), D1, D2, heard={"d1": Heard(0.0, sent)}, last=Place("", "d2"))
    assert (found.kind, found.decode_worker) == ("spill", "d2")


@pytest.mark.parametrize("local", [0, 256])
def test_without_a_prefill_worker_decode_serves_any_prompt(local: int) -> None:
    """Also with max_local_prefill_tokens: 0, which is about sparing those who decode while there is a choice."""
    gone = worker("p1", status="draining"), worker("p2", status="warming"), worker("p3", model="other")
    for absent in ((), gone):
        found = route(*absent, D1, num_tokens=50_000, local=local)
        assert (found, found.kind, found.num_uncached) == (Route(None, "d1"), "alone", 50_000)
        assert found.reason == "no prefill worker for model 'tiny' is ready: decode prefills itself"


def test_a_prefill_worker_that_has_refused_is_there_all_the_same() -> None:
    with pytest.raises(NoWorker):
        route(P1, D1, excluded=("p1",))
    assert route(D1, D2, excluded=("d1",)) == Route(None, "d2")


def test_alone_goes_to_the_least_loaded_that_has_a_slot() -> None:
    full = worker("d1", num_running=4, max_num_seqs=4)
    assert route(full, worker("d2", waiting=9000)) == Route(None, "d2")
    assert route(full) == Route(None, "d1")
    assert route(worker("d1"), worker("d2"), held={"d2": 160}) == Route(None, "d2")
    assert route(worker("d1"), worker("d2"), last=Place("", "d2")) == Route(None, "d2")


def test_colocated_workers_come_before_decode_workers_alone() -> None:
    found = route(worker("d1"), worker("d2", colocated=True, waiting=9000))
    assert (found, found.kind) == (Route(None, "d2"), "colocated")
