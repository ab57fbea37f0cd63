"""When a decode worker tells what its trace has still to be told: while nobody waits for that, and to the end."""

import time

import pytest

from distserve.engine.batching import Batch
from tests.unit.decode.decode_world import World, running
from tests.waiting import until

NUM = 40
SLOW_S = 0.3


async def test_what_is_told_in_a_pass_holds_up_none_of_its_tokens_and_is_no_part_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pass ends while the third is told, which takes long."""
    w = World()
    told: list[int] = []
    noted: list[tuple[int, float]] = []  # of each pass: how many were told by then, and how long it lasted
    note_pass = w.scheduler.note_pass

    def note(batch: Batch, seconds: float) -> None:
        noted.append((len(told), seconds))
        note_pass(batch, seconds)

    def tell(number: int) -> None:
        told.append(number)
        if number == 2:
            w.runner.gate.set()
            time.sleep(SLOW_S)

    monkeypatch.setattr(w.scheduler, "note_pass", note)
    w.runner.gate.clear()
    async with running(w, reap_s=60):
        await w.hand_over("a")
        for number in range(NUM):
            w.worker._record.untold.add(lambda number=number: tell(number))  # type: ignore[misc]
        await w.ended("a")
        assert noted[0][0] == 3
        assert sum(seconds for _, seconds in noted) < SLOW_S
        assert sum(s.value for f in w.figures.families() for s in f.samples if s.name.endswith("pass_seconds_sum")) < (
            SLOW_S
        )
        assert w.worker._tokens_per_s > 1 / SLOW_S
        await until(lambda: len(told) == NUM, what="the rest is told when there is nothing to compute")
    assert told == list(range(NUM))


async def test_what_comes_while_it_is_idle_waits_for_one_of_them_not_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World()
    told: list[int] = []
    looked: list[int] = []  # for work: how many were told by then
    next_batch = w.scheduler.next_batch

    def look() -> Batch:
        looked.append(len(told))
        return next_batch()

    def tell(number: int) -> None:
        told.append(number)
        if number == 4:
            w.worker.on_freed()  # as when something comes

    async with running(w, reap_s=60):
        await until(lambda: not w.worker._wake.is_set())
        monkeypatch.setattr(w.scheduler, "next_batch", look)
        for number in range(NUM):
            w.worker._record.untold.add(lambda number=number: tell(number))  # type: ignore[misc]
        w.worker.on_freed()
        await until(lambda: len(told) == NUM, what="all are told")
    assert looked == [0, 5]


async def test_the_end_leaves_nothing_untold() -> None:
    w = World()
    async with running(w, reap_s=60):
        await w.idle()
        told: list[int] = []
        for number in range(NUM):
            w.worker._record.untold.add(lambda number=number: told.append(number))  # type: ignore[misc]
        await w.worker.drain(1.0)
        assert told == list(range(NUM))


async def test_now_and_then_what_is_left_is_told_however_busy_it_is() -> None:
    w = World()
    w.runner.gate.clear()
    async with running(w):
        await w.hand_over("a")
        await until(w.runner.in_pass.is_set)
        await until(lambda: not w.worker._record.untold)
        told: list[int] = []
        for number in range(NUM):
            w.worker._record.untold.add(lambda number=number: told.append(number))  # type: ignore[misc]
        await until(lambda: len(told) == NUM, what="all are told though the pass goes on")
