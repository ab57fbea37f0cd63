"""Which decode worker is asked next."""

from typing import Any

import msgspec

from distserve.messages import Load, SamplingParams, SequenceKey, SubmitRequest, WorkerInfo
from distserve_prefill.candidates import decode_candidates
from tests.unit.worker.fakes import LAYOUT

REQUEST = SubmitRequest(
    key=SequenceKey("a"),
    model="m",
    gateway="g",
    token_ids=[1],
    num_prompt_tokens=1,
    sampling=SamplingParams(max_tokens=4),
    decode_worker="chosen",
)


def worker(worker_id: str, free_blocks: int = 10, **more: Any) -> WorkerInfo:
    fields = {"role": "decode", "model": "m", "status": "ok", "layout": LAYOUT, "load": Load(free_blocks=free_blocks)}
    return WorkerInfo(worker_id=worker_id, **(fields | more))


def in_turn(*workers: WorkerInfo) -> list[str]:
    snapshot, tried = {w.worker_id: w for w in workers}, list[str]()
    while (found := decode_candidates(snapshot, REQUEST, LAYOUT, set(tried))) is not None:
        tried.append(found)
    return tried


def test_the_chosen_one_then_the_emptiest_and_degraded_ones_last() -> None:
    assert in_turn(
        worker("degraded", 99, status="degraded"), worker("full", 1), worker("chosen", 0), worker("empty", 50)
    ) == ["chosen", "empty", "full", "degraded"]


def test_a_degraded_worker_is_still_taken_when_the_gateway_chose_it() -> None:
    assert in_turn(worker("other"), worker("chosen", status="degraded")) == ["chosen", "other"]


def test_those_that_cannot_take_it_are_not_asked() -> None:
    others = {
        "draining": {"status": "draining"},
        "warming": {"status": "warming"},
        "of another model": {"model": "n"},
        "of another layout": {"layout": msgspec.structs.replace(LAYOUT, num_layers=3)},
        "colocated": {"colocated": True},
        "a prefill worker": {"role": "prefill"},
    }
    assert in_turn(worker("chosen"), *(worker(name, **what) for name, what in others.items())) == ["chosen"]


def test_a_chosen_one_that_is_not_in_the_snapshot_yet_is_asked_all_the_same() -> None:
    assert in_turn(worker("other")) == ["chosen", "other"]
