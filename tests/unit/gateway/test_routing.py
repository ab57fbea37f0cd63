"""Routing: a pure function of the snapshot."""

import random
from typing import Any

import msgspec
import pytest

from distserve.errors import NoWorker
from distserve.messages import Load, Role, WorkerInfo, WorkerStatus
from distserve_gateway.costs import OwnLoad
from distserve_gateway.route import Route
from distserve_gateway.routing import choose, context_length
from tests.unit.gateway.scripted import LAYOUT


def worker(
    worker_id: str,
    *,
    model: str = "tiny",
    status: WorkerStatus = "ok",
    waiting: int = 0,
    free: int = 10,
    dtype: str = "float32",
    colocated: bool = False,
    **load: Any,
) -> WorkerInfo:
    roles: dict[str, Role] = {"p": "prefill", "d": "decode", "g": "gateway"}
    return WorkerInfo(
        worker_id=worker_id,
        role=roles[worker_id[0]],
        model=model,
        status=status,
        layout=msgspec.structs.replace(LAYOUT, dtype=dtype),
        max_model_len=100,
        colocated=colocated,
        load=Load(num_waiting_tokens=waiting, free_blocks=free, **load),
    )


def route(*workers: WorkerInfo, in_flight: dict[str, int] | None = None, excluded: tuple[str, ...] = ()) -> Route:
    return choose({w.worker_id: w for w in workers}, "tiny", OwnLoad(in_flight or {}), excluded)


def test_the_least_loaded_of_each_role() -> None:
    workers = worker("p1", waiting=5), worker("p2", waiting=3), worker("d1", waiting=1), worker("d2")
    assert route(*workers) == Route("p2", "d2")


def test_what_this_gateway_has_sent_counts_as_load() -> None:
    workers = worker("p1", waiting=5), worker("p2", waiting=3), worker("d1"), worker("d2")
    assert route(*workers, in_flight={"p2": 3, "d1": 1}) == Route("p1", "d2")


def test_of_equals_the_one_with_more_free_blocks() -> None:
    assert route(worker("p1"), worker("p2", free=11), worker("d1", free=3), worker("d2", free=2)) == Route("p2", "d1")


def test_only_workers_that_are_ok_of_this_model_and_not_excluded() -> None:
    workers = (
        worker("p1", status="draining"),
        worker("p2", status="warming"),
        worker("p3", model="other"),
        worker("p4"),
        worker("p5", waiting=9),
        worker("d1"),
        worker("g1"),
    )
    assert route(*workers, excluded=("p4",)) == Route("p5", "d1")


def test_a_degraded_worker_is_used_where_no_other_fits() -> None:
    poor_prefill, poor_decode = worker("p1", status="degraded"), worker("d1", status="degraded")
    assert route(poor_prefill, worker("p2", waiting=99), poor_decode, worker("d2", free=0)) == Route("p2", "d2")
    assert route(poor_prefill, worker("p2"), poor_decode, excluded=("p2",)) == Route("p1", "d1")


def test_a_pair_has_equal_layouts() -> None:
    workers = worker("p1", dtype="bfloat16"), worker("p2", waiting=50), worker("d1"), worker("d2", dtype="float16")
    assert route(*workers) == Route("p2", "d1")
    misfit = route(worker("p1", dtype="bfloat16"), worker("d1"))
    assert (misfit, misfit.kind) == (Route(None, "d1"), "alone")
    assert "KV layout" in misfit.reason


def test_a_colocated_worker_serves_alone_and_takes_no_hand_over() -> None:
    assert route(worker("d1", colocated=True), worker("d2", colocated=True, free=99)) == Route(None, "d2")
    assert route(worker("p1"), worker("d1", colocated=True)) == Route(None, "d1")
    assert route(worker("p1"), worker("d1", colocated=True), worker("d2", waiting=5)) == Route("p1", "d2")


def test_a_missing_role_is_named() -> None:
    for workers, excluded, role in (
        ((), (), "decode"),
        ((worker("p1"),), (), "decode"),
        ((worker("p1"), worker("d1")), ("p1",), "prefill"),
        ((worker("p1"), worker("d1")), ("d1",), "decode"),
    ):
        with pytest.raises(NoWorker) as caught:
            route(*workers, excluded=excluded)
        assert caught.value.role == role
        assert caught.value.retry_after_s > 0


def test_the_context_is_what_every_worker_of_the_model_takes() -> None:
    snapshot = {w.worker_id: w for w in (worker("p1"), worker("d1", model="other"))}
    assert context_length(snapshot, "tiny", 7) == 100
    assert context_length({}, "tiny", 7) == 7


@pytest.mark.parametrize("seed", range(200))
def test_the_pair_is_the_best_of_all_pairs(seed: int) -> None:
    """Whatever way it is found: the first by the prefill worker's load, then by the decode worker's."""
    draw = random.Random(seed)
    workers = [
        worker(
            f"{role}{i}",
            waiting=draw.randrange(3),
            free=draw.randrange(3),
            status=draw.choice(["ok", "ok", "degraded"]),
            dtype=draw.choice(["float32", "bfloat16"]),
        )
        for role in "pd"
        for i in range(draw.randrange(1, 5))
    ]

    def load(w: WorkerInfo) -> tuple[bool, int, int, str]:
        return w.status == "degraded", w.load.num_waiting_tokens, -w.load.free_blocks, w.worker_id

    pairs = [
        (p, d) for p in workers for d in workers if p.role == "prefill" and d.role == "decode" and p.layout == d.layout
    ]
    if not pairs:
        assert route(*workers) == Route(None, min((w for w in workers if w.role == "decode"), key=load).worker_id)
        return
    prefill, decode = min(pairs, key=lambda pair: (load(pair[0]), load(pair[1])))
    assert route(*workers) == Route(prefill.worker_id, decode.worker_id)
