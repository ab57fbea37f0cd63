"""What is left of a promise, at each hop."""

from typing import Any, cast

import pytest

from benchmarks.null_engine.engine import build_null_engine
from distserve.config import Config
from distserve.engine.sequence import Sequence
from distserve.errors import NoWorker
from distserve.kv.block_pool import BlockPool
from distserve.messages import LeaseRequest, SamplingParams, SequenceKey, Slo, SubmitRequest, decode_as
from distserve.worker.figures import WorkerFigures
from distserve_prefill.handoff import Handoff
from distserve_prefill.job import Job
from distserve_prefill.main import compose, handoff_factory
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


class AsksBus:
    """Nobody is there to answer."""

    def __init__(self) -> None:
        self.heard: list[LeaseRequest] = []

    async def request(
        self, subject: str, data: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> bytes:
        self.heard.append(decode_as(LeaseRequest, data))
        raise NoWorker("nobody is there")


def handoff(bus: AsksBus, deadline: float, slo: Slo = Slo()) -> Handoff:
    none = cast(Any, None)
    plane = cast(Any, type("Plane", (), {"in_use": None}))
    figures = WorkerFigures("prefill", "m", BlockPool(2))
    return handoff_factory(Config(), "p", cast(Any, bus), none, LAYOUT, plane, {}, none, figures)(job(deadline, slo))


async def asked(handoff: Handoff, bus: AsksBus) -> LeaseRequest:
    """What a decode worker is asked now."""
    with pytest.raises(NoWorker):
        await handoff._ask_for_lease("d", ["shm"])
    return bus.heard.pop()


async def test_decode_may_hold_each_request_no_longer_than_what_is_left_of_the_deadline(monkeypatch: Any) -> None:
    now, most_s, bus = [50.0], Config().prefill.lease_wait_s, AsksBus()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    soon, never = handoff(bus, deadline=50.0 + most_s + 5.0), handoff(bus, deadline=float("inf"))
    assert (await asked(soon, bus)).wait_s == (await asked(never, bus)).wait_s == most_s
    now[0] += most_s
    assert (await asked(soon, bus)).wait_s == 5.0
    now[0] += 6.0
    assert (await asked(soon, bus)).wait_s == 0.0
    assert (await asked(never, bus)).wait_s == most_s


async def test_it_is_told_what_is_left_of_the_promise(monkeypatch: Any) -> None:
    bus = AsksBus()
    monkeypatch.setattr("time.monotonic", lambda: 0.25)
    one = handoff(bus, deadline=52.0, slo=Slo(ttft_s=1.0, tpot_s=0.1))
    assert (await asked(one, bus)).slo == Slo(ttft_s=0.75, tpot_s=0.1)


def test_a_prompt_that_has_begun_pauses_for_a_part_of_what_its_lease_lives_without_a_byte() -> None:
    none = cast(Any, None)
    config = Config()
    parts = build_null_engine(config, role="prefill", max_num_seqs=0, keep_hidden=False)
    store = cast(Any, type("Store", (), {"client": None}))
    figures = WorkerFigures("prefill", "m", parts.pool)
    worker, _ = compose(config, "p", none, none, parts, none, none, {}, none, store, figures)
    assert worker._scheduler._rules().longest_pause_s < config.kv.lease_ttl_s / 2
