"""What a prefill worker's figures come to, by what becomes of its sequences."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from distserve.bus.base import RegistryEvent
from distserve.errors import DeadlineExceeded, PeerLost
from distserve.messages import SamplingParams, SequenceKey
from distserve.worker.prefix_metrics import hit_rate
from tests.unit.prefill.prefill_side import World, running
from tests.waiting import until

KEY = SequenceKey("a")
ONE_TOKEN = SamplingParams(max_tokens=1)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(World()) as w:
        yield w


def figures(w: World) -> dict[tuple[str, ...], float]:
    """(name without its prefix, values of its own labels) -> value."""
    return {
        (s.name.removeprefix("distserve_worker_"), *list(s.labels.values())[2:]): s.value
        for family in w.figures.families()
        for s in family.samples
    }


def counts(w: World, *names: str) -> list[float]:
    found = figures(w)
    return [found[f"{name}_seconds_count",] for name in names]


async def test_a_sequence_is_counted_where_it_comes_and_where_it_goes(world: World) -> None:
    world.submit("a", num_tokens=70)
    await until(lambda: world.worker.status_of(SequenceKey("a"), 1).phase == "handoff")
    assert counts(world, "queue", "prefill") == [1, 1]
    before = figures(world)
    assert before["sequences_total", "handed_over"] == 0
    assert (before["blocks", "used"], before["blocks", "free"]) == (5, 15)
    world.handoffs["a"].may_commit.set()
    await world.idle()
    after = figures(world)
    assert after["sequences_total", "handed_over"] == 1
    assert after["handoff_seconds_count", "shm"] == 1
    assert after["pass_seconds_count", "prefill"] == 3  # chunks of 32
    assert after["batch_sequences_sum", "prefill"] == 3
    assert after["batch_tokens_sum", "prefill"] == 70
    assert after["pass_seconds_count", "decode"] == 0


async def test_ends_are_counted_once_each_by_outcome_and_error(world: World) -> None:
    world.submit("done", sampling=ONE_TOKEN)
    await until(lambda: world.chunk("done", ended=True) is not None)
    world.submit("nan")
    await world.error_of("nan")
    world.submit("late", deadline_s=0.05)
    await world.error_of("late")
    world.submit("lost")
    await until(lambda: "lost" in world.handoffs)
    world.handoffs["lost"].error = PeerLost("decode is gone")
    world.handoffs["lost"].may_commit.set()
    await world.error_of("lost")
    world.submit("unwanted")
    world.worker.cancel(SequenceKey("unwanted"))
    world.worker.cancel(SequenceKey("unwanted"), PeerLost("again"))
    await world.idle()
    found = figures(world)
    ends = {key[1]: value for key, value in found.items() if key[0] == "sequences_total"}
    assert ends == {"finished": 1, "handed_over": 0, "cancelled": 1, "error": 3}
    faults = {key[1]: value for key, value in found.items() if key[0] == "faults_total"}
    assert faults == {"internal_error": 1, "deadline_exceeded": 1, "peer_lost": 1}
    assert counts(world, "queue", "prefill") == [4, 3]  # one had no first token, one did not even begin


WAYS: dict[str, Callable[[World], None]] = {
    "cancelled": lambda w: w.worker.cancel(KEY),
    "failed": lambda w: w.worker.cancel(KEY, DeadlineExceeded("too late")),
    "its gateway gone": lambda w: w.worker.on_registry(RegistryEvent("gone", "g", None, "expired")),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(("ends", "outcome"), [("well", "handed_over"), ("badly", "error"), ("here", "finished")])
async def test_what_has_ended_is_counted_as_it_ended_whatever_comes_then(
    world: World, ends: str, outcome: str, way: Callable[[World], None]
) -> None:
    """While what it holds is still being released."""
    may_abort, aborting = asyncio.Event(), asyncio.Event()

    async def abort(reason: str) -> None:
        aborting.set()
        await may_abort.wait()

    stop = (100,) if ends == "here" else ()
    world.runner.gate.clear()
    world.submit("a", sampling=SamplingParams(max_tokens=8, stop_token_ids=stop))
    await until(lambda: "a" in world.handoffs)
    handoff = world.handoffs["a"]
    handoff.abort = abort  # type: ignore[method-assign]
    handoff.error = PeerLost("decode is gone") if ends == "badly" else None
    handoff.may_commit.set()
    world.runner.gate.set()
    await until(aborting.is_set)
    way(world)
    may_abort.set()
    await world.idle()
    found = figures(world)
    ended = {key[1]: value for key, value in found.items() if key[0] == "sequences_total" and value}
    faults = {key[1]: value for key, value in found.items() if key[0] == "faults_total"}
    assert ended == {outcome: 1}
    assert faults == ({"peer_lost": 1} if ends == "badly" else {})


async def test_one_that_is_cancelled_before_its_hand_over_has_begun_is_not_handed_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the pass and the start of the task that hands over."""
    passed = world.worker._recorder.passed

    def then_cancel(*of: Any) -> None:
        passed(*of)
        assert world.worker._jobs[KEY].ending is not None
        world.handoffs["a"].may_commit.set()
        world.worker.cancel(KEY)

    monkeypatch.setattr(world.worker._recorder, "passed", then_cancel)
    world.submit("a")
    await until(lambda: "a" in world.handoffs and bool(world.handoffs["a"].aborted))
    await world.idle()
    assert not world.handoffs["a"].states
    assert figures(world)["sequences_total", "cancelled"] == 1


async def test_a_failed_pass_is_no_measure_of_passes(world: World) -> None:
    world.runner.fail = RuntimeError("boom")
    world.submit("a")
    await world.error_of("a")
    await world.idle()
    assert figures(world)["pass_seconds_count", "prefill"] == 0


async def test_the_hit_rate_is_of_tokens_that_were_begun(world: World) -> None:
    assert hit_rate(world.prefixes) is None
    for name in ("a", "b"):  # the second finds 2 blocks
        world.submit(name, sampling=ONE_TOKEN, num_tokens=40, cache_salt="")
        await until(lambda name=name: world.chunk(name, ended=True) is not None)  # type: ignore[misc]
    assert hit_rate(world.prefixes) == 32 / 80
