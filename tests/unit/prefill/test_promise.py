"""What is left of a promise, at each hop."""

from typing import Any, cast

from distserve.config import Config
from distserve.engine.sequence import Sequence
from distserve.messages import SamplingParams, SequenceKey, Slo, SubmitRequest
from distserve_prefill.job import Job
from distserve_prefill.main import handoff_factory
from distserve_prefill.promise import after
from tests.unit.worker.fakes import LAYOUT


def test_what_is_left_goes_below_nothing_and_nothing_stays_nothing() -> None:
    assert after(Slo(priority="vip", ttft_s=0.5, tpot_s=0.1), 2.0) == Slo(priority="vip", ttft_s=-1.5, tpot_s=0.1)
    assert after(Slo(priority="batch", tpot_s=0.1), 2.0) == Slo(priority="batch", tpot_s=0.1)


def job(deadline: float, slo: Slo) -> Job:
    key, sampling = SequenceKey("a"), SamplingParams(max_tokens=4)
    request = SubmitRequest(
        key=key, model="m", gateway="g", token_ids=[1] * 20, num_prompt_tokens=20, sampling=sampling, slo=slo
    )
    return Job(request, Sequence(key, [1] * 20, 20, sampling), deadline, accepted_at=0.0)


def asked(deadline: float, slo: Slo = Slo()) -> Any:
    """The LeaseRequest that a hand-over is begun with."""
    none = cast(Any, None)
    plane = cast(Any, type("Plane", (), {"in_use": None}))
    config = Config()
    return handoff_factory(config, "p", none, none, LAYOUT, plane, {}, none)(job(deadline, slo))._ask


def test_decode_may_hold_a_request_no_longer_than_its_deadline(monkeypatch: Any) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 50.0)
    assert asked(deadline=52.0).wait_s == 2.0
    assert asked(deadline=float("inf")).wait_s == Config().prefill.lease_wait_s
    assert asked(deadline=49.0).wait_s == 0.0


def test_it_is_told_what_is_left_of_the_promise(monkeypatch: Any) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 0.25)
    assert asked(deadline=52.0, slo=Slo(ttft_s=1.0, tpot_s=0.1)).slo == Slo(ttft_s=0.75, tpot_s=0.1)
