"""When a prefill worker tells what its trace has still to be told: while a pass runs or none is due, and to the end."""

from typing import Any

import pytest

from distserve.messages import SamplingParams
from distserve.telemetry import begin, entered, finish
from distserve_prefill import stay
from tests.spans import collected
from tests.unit.prefill.prefill_side import World, running
from tests.waiting import until

NUM = 40


async def test_between_two_passes_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World()
    in_pass: list[bool] = []

    def told(name: str, *of: Any, **more: Any) -> None:
        in_pass.append(bool(w.worker._in_pass))

    monkeypatch.setattr(stay, "stage", told)
    with collected():
        async with running(w, reap_s=60):
            outer = begin("send prefill", kind="client")
            w.runner.gate.clear()
            with entered(outer):
                w.submit("a", num_tokens=100, sampling=SamplingParams(max_tokens=1))  # chunks of 32
            finish(outer)
            await until(lambda: len(in_pass) == 1, what="its queue is told, in its first pass")
            w.runner.gate.set()
            await until(lambda: len(in_pass) == 5, what="all of it is")
    assert in_pass[0]
    last = in_pass.index(False) if False in in_pass else 5  # what is left when no pass is due
    assert not any(in_pass[last:])
    assert w.runner.num_passes == 4


async def test_a_pass_that_ends_while_something_is_told_waits_for_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World()
    told: list[int] = []
    noted: list[int] = []  # at the end of each pass: how many were told by then
    monkeypatch.setattr(w.worker._scheduler, "note_pass", lambda batch, seconds: noted.append(len(told)))

    def tell(number: int) -> None:
        told.append(number)
        if number == 2:
            w.runner.gate.set()
            w.engine._executor.submit(int).result(10)  # after the pass

    w.runner.gate.clear()
    async with running(w, reap_s=60):
        w.submit("a", num_tokens=20, sampling=SamplingParams(max_tokens=1))
        for number in range(NUM):
            w.worker._recorder.untold.add(lambda number=number: tell(number))  # type: ignore[misc]
        await until(lambda: w.chunk("a", ended=True) is not None)
        await until(lambda: len(told) == NUM, what="the rest is told when no pass is due")
    assert noted == [3]
    assert told == list(range(NUM))


async def test_the_end_leaves_nothing_untold() -> None:
    w = World()
    async with running(w, reap_s=60):
        await w.idle()
        told: list[int] = []
        for number in range(NUM):
            w.worker._recorder.untold.add(lambda number=number: told.append(number))  # type: ignore[misc]
        await w.worker.drain(1.0)
        assert told == list(range(NUM))
