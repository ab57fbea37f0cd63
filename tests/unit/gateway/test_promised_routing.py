"""Routing of requests that were promised something: those who keep it come first, and nobody is asked in vain."""

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distserve.errors import SloUnattainable
from distserve.messages import Backlog, PassSpeed, WorkerInfo
from distserve_gateway.costs import Demand, OwnLoad, Place
from distserve_gateway.predicting import Heard, Sent, Standing
from distserve_gateway.route import Route
from distserve_gateway.routing import choose
from tests.unit.gateway.test_routing import worker

SPEED = PassSpeed(token_s=0.001)
NOW = 100.0


def busy(name: str, wait_s: float, **more: Any) -> WorkerInfo:
    """One that has so much to do before whoever comes."""
    steps = [Backlog(due_s, "normal", wait_s) for due_s in (0.001, math.inf)]
    options = {"speed": SPEED, "pass_tokens": 1000, "backlog": steps, "waiting": round(wait_s * 1000)}
    return worker(name, **(options | more))


class Watched(Sent):
    """Counts how often it is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.looks += name == "due"
        return super().__getattribute__(name)


def route(
    *workers: WorkerInfo,
    ttft_s: float | None = 1.0,
    over_s: float = 0.0,
    tpot_s: float | None = None,
    num_tokens: int = 400,
    held: dict[str, int] | None = None,
    last: Place = Place(),
    local: int = 0,
    excluded: tuple[str, ...] = (),
    sent: tuple[Sent, ...] = (),
) -> Route:
    """`over_s` of the promise are over already; `sent`: to each worker since its beat."""
    due = math.inf if ttft_s is None else NOW + ttft_s - over_s
    demand = Demand(num_tokens, held or {}, last, local, Standing("normal", due), ttft_s, tpot_s)
    heard = {w.worker_id: Heard(NOW, sent) for w in workers}
    Watched.looks = 0
    return choose({w.worker_id: w for w in workers}, "tiny", OwnLoad(heard=heard), excluded, demand, NOW)


D1, D2 = worker("d1"), worker("d2")


def test_a_worker_that_is_in_time_comes_before_a_cheaper_one() -> None:
    """p2 computes five times as fast, behind a queue that counts more tokens."""
    fast = busy("p2", 0.5, speed=PassSpeed(token_s=0.0002), waiting=2500)
    slow = busy("p1", 0.7)
    assert route(slow, fast, D1).prefill_worker == "p2"
    assert route(slow, fast, D1, ttft_s=None).prefill_worker == "p1"
    assert route(slow, fast, D1, ttft_s=1.2).prefill_worker == "p1"


def test_a_conversation_is_left_where_that_keeps_the_promise() -> None:
    last = Place("p2", "d1")
    assert route(busy("p1", 0.0), busy("p2", 0.5), D1, last=last).prefill_worker == "p2"
    assert route(busy("p1", 0.0), busy("p2", 0.7), D1, last=last).prefill_worker == "p1"
    assert route(busy("p1", 0.0), busy("p2", 0.7), D1, last=last, ttft_s=None).prefill_worker == "p2"


def test_a_degraded_worker_that_is_in_time_comes_before_one_that_is_not() -> None:
    degraded = busy("p2", 0.0, status="degraded")
    assert route(busy("p1", 0.65), degraded, D1).prefill_worker == "p2"
    assert route(busy("p1", 0.6), degraded, D1).prefill_worker == "p1"


def test_one_whose_speed_is_unknown_is_asked() -> None:
    assert route(busy("p1", 5.0), worker("p2"), D1).prefill_worker == "p2"
    assert route(worker("p1", waiting=100_000), D1).prefill_worker == "p1"


def test_where_all_are_late_it_is_refused_and_told_when_to_try_again() -> None:
    with pytest.raises(SloUnattainable) as caught:
        route(busy("p1", 2.0), busy("p2", 0.9), D1, over_s=0.25)
    error = caught.value
    assert error.fields == {
        "ttft_s": pytest.approx(0.25 + 0.9 + 0.4),
        "slo_s": 1.0,
        "retry_after_s": pytest.approx(0.9 + 0.4 - 0.75, abs=1e-3),
    }
    assert error.message == ("the first token is promised within 1 s, it would come after 1.55 s: try again in 0.55 s")


def test_an_excluded_worker_does_not_count() -> None:
    with pytest.raises(SloUnattainable) as caught:
        route(busy("p1", 0.0), busy("p2", 0.9), D1, excluded=("p1",))
    assert caught.value.retry_after_s == pytest.approx(0.3, abs=2e-3)


def test_a_decode_worker_that_would_not_take_it_is_not_what_is_waited_for() -> None:
    """d1 would have the first token at once, had it a slot; d2 is not as well as the one that prefill hands over to."""
    options: dict[str, Any] = {"speed": SPEED, "pass_tokens": 256}
    full = worker("d1", num_running=8, max_num_seqs=8, **options)
    degraded = worker("d2", status="degraded", **options)
    well = busy("d3", 9.0)
    for takers in ((full,), (degraded, well), (full, degraded, well)):
        with pytest.raises(SloUnattainable) as caught:
            route(busy("p1", 2.0), *takers, ttft_s=0.5, num_tokens=200, local=256)
        assert caught.value.ttft_s == pytest.approx(2.2)
        assert caught.value.retry_after_s == pytest.approx(1.7, abs=2e-3)
    with pytest.raises(SloUnattainable) as caught:  # all of prefill has refused: only what holds most is asked
        route(
            busy("p1", 0.0),
            busy("d1", 2.0),
            busy("d2", 0.4),
            num_tokens=200,
            local=256,
            excluded=("p1",),
            held={"d1": 160},
        )
    assert caught.value.ttft_s == pytest.approx(2.04)


def test_a_refusal_looks_once_at_what_was_sent_to_each_worker() -> None:
    sent = tuple(Watched(NOW, work_s=0.01, due=NOW + 1 + i / 100) for i in range(200))
    prefills = [busy(f"p{i}", 2.0 + i) for i in range(4)]
    with pytest.raises(SloUnattainable) as caught:
        route(*prefills, D1, local=256, sent=sent)
    assert "retry_after_s" in caught.value.fields
    assert 0 < Watched.looks <= 4 * len(sent)


def test_what_is_promised_nothing_and_is_prefills_alone_is_not_predicted() -> None:
    sent = tuple(Watched(NOW, work_s=0.01, due=NOW + 1) for _ in range(10))
    found = route(busy("p1", 2.0), busy("p2", 1.0), worker("d2", colocated=True), D1, ttft_s=None, sent=sent)
    assert (found.prefill_worker, Watched.looks) == ("p2", 0)
    assert route(busy("p1", 2.0), D1, ttft_s=None, local=399, sent=sent).kind == "pair"  # too long to spill
    assert Watched.looks == 0


def test_a_tenth_of_the_promise_is_left_to_the_worker_to_judge() -> None:
    assert route(busy("p1", 0.69), D1).prefill_worker == "p1"
    with pytest.raises(SloUnattainable):
        route(busy("p1", 0.71), D1)
    assert route(busy("p1", 0.69), busy("p2", 0.65), D1).prefill_worker == "p2"  # the least late


def test_a_prompt_too_long_for_an_idle_worker_is_told_the_least_time() -> None:
    with pytest.raises(SloUnattainable, match="the prompt alone takes 3 s") as caught:
        route(busy("p1", 2.0), D1, num_tokens=3000)
    assert "retry_after_s" not in caught.value.fields
    assert caught.value.ttft_s == pytest.approx(5.0)
    # Where a worker holds most of it, it is not too long; one that can be in time later is what counts.
    with pytest.raises(SloUnattainable) as caught:
        route(busy("p1", 2.0), busy("p2", 0.0), D1, num_tokens=3000, held={"p1": 2900})
    assert caught.value.retry_after_s == pytest.approx(1.1, abs=2e-3)


def test_a_late_prefill_worker_gives_way_to_decode_and_to_colocated_workers() -> None:
    decode = worker("d1", speed=SPEED, pass_tokens=256)
    found = route(busy("p1", 2.0), decode, num_tokens=200, local=256)
    assert (found.kind, found.decode_worker) == ("spill", "d1")
    found = route(busy("p1", 2.0), decode, worker("d2", colocated=True, speed=SPEED, pass_tokens=256))
    assert (found.kind, found.decode_worker) == ("colocated", "d2")
    assert route(busy("p1", 2.0), decode, worker("d2", colocated=True), ttft_s=None).kind == "pair"


def test_decode_that_holds_most_but_is_late_leaves_it_to_busy() -> None:
    slow, p1, held = (
        worker("d1", speed=PassSpeed(token_s=0.02), pass_tokens=256),
        busy("p1", 0.0),
        {"d1": 304, "p1": 304},
    )
    assert route(p1, slow, held=held, local=256, ttft_s=None).kind == "local"
    assert route(p1, slow, held=held, local=256).kind == "pair"


def test_alone_is_refused_by_its_own_prediction() -> None:
    with pytest.raises(SloUnattainable) as caught:
        route(busy("d1", 2.0))
    assert caught.value.retry_after_s == pytest.approx(1.4, abs=2e-3)
    assert route(busy("d1", 2.0), ttft_s=None).kind == "alone"


def test_decode_workers_whose_steps_are_slower_than_promised_come_later_and_full_ones_last() -> None:
    quick = worker("d2", step_s=0.018, speed=SPEED, waiting=9000)
    slow = worker("d1", step_s=0.0191, speed=SPEED)
    p1 = busy("p1", 0.0)
    assert route(p1, slow, quick, tpot_s=0.02).decode_worker == "d2"  # a sequence more makes 20.1 ms of 19.1
    assert route(p1, slow, quick, tpot_s=0.021).decode_worker == "d1"
    assert route(p1, slow, quick).decode_worker == "d1"
    full = worker("d3", num_running=8, max_num_seqs=8)
    assert route(p1, full, slow, tpot_s=0.02).decode_worker == "d1"
    assert route(p1, full, tpot_s=0.02).decode_worker == "d3"
    assert route(p1, full, worker("d1", waiting=90_000), ttft_s=None, last=Place("", "d3")).decode_worker == "d1"


@given(st.lists(st.floats(0, 3), min_size=1, max_size=5), st.floats(0.45, 3), st.integers(0, 4))
def test_nobody_is_asked_who_is_plainly_late_while_another_is_not(
    waits: list[float], ttft_s: float, num_unknown: int
) -> None:
    known = [busy(f"p{i}", wait_s) for i, wait_s in enumerate(waits)]
    unknown = [worker(f"p9{i}", waiting=10_000) for i in range(num_unknown)]
    late = {w.worker_id: wait_s + 0.4 - ttft_s for w, wait_s in zip(known, waits, strict=True)}
    assume(abs(min(late.values()) - 0.1 * ttft_s) > 1e-6)
    if num_unknown or min(late.values()) <= 0.1 * ttft_s:
        chosen = route(*known, *unknown, D1, ttft_s=ttft_s).prefill_worker
        assert chosen is not None
        assert late.get(chosen, 0.0) <= max(0.0, min(late.values()) if not num_unknown else 0.0) + 1e-9
    else:
        with pytest.raises(SloUnattainable) as caught:
            route(*known, *unknown, D1, ttft_s=ttft_s)
        assert caught.value.retry_after_s == pytest.approx(min(late.values()), abs=2e-3)
