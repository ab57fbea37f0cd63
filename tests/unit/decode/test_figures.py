"""What a decode worker counts and measures of its sequences and passes, and that it costs no more where nothing is
traced."""

from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.errors import PeerLost
from distserve.messages import SequenceKey
from distserve_decode import metrics, record, stay
from tests.unit.decode.decode_world import World, running
from tests.unit.decode.test_offering import FAST, goes_on, preempted
from tests.unit.decode.test_reservations import ask
from tests.waiting import until


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(World(num_blocks=20, block_bytes=1024)) as w:
        yield w


def shown(w: World) -> dict[str, float]:
    """`name{values}` of every sample but buckets and times."""
    families = w.figures.families() + metrics.families(w.scheduler, w.worker.offering, "m")
    return {
        f"{s.name.removeprefix('distserve_')}{{{','.join(list(s.labels.values()))}}}": s.value
        for family in families
        for s in family.samples
        if not s.name.endswith(("_bucket", "_created"))
    }


async def test_a_hand_over_is_decoded_a_prompt_queues_and_is_computed_too(world: World) -> None:
    await world.hand_over("a", max_tokens=5)
    await world.ended("a")
    found = shown(world)
    assert found["worker_decode_seconds_count{decode,m}"] == 1
    assert found["worker_queue_seconds_count{decode,m}"] == 0
    assert found["worker_pass_seconds_count{decode,m,decode}"] == 4
    assert found["worker_batch_sequences_sum{decode,m,decode}"] == 4
    assert found["worker_pass_seconds_sum{decode,m,decode}"] <= found["worker_decode_seconds_sum{decode,m}"]
    world.submit("b", [3] * 100, max_tokens=5)
    await world.ended("b")
    await world.idle()
    found = shown(world)
    stages = ("queue", "prefill", "decode")
    assert [found[f"worker_{name}_seconds_count{{decode,m}}"] for name in stages] == [1, 1, 2]
    assert found["worker_pass_seconds_count{decode,m,prefill}"] == 4
    assert found["worker_batch_tokens_sum{decode,m,prefill}"] == 100
    assert found["worker_pass_seconds_count{decode,m,decode}"] == 4 + 4
    assert found["worker_sequences_total{decode,m,finished}"] == 2


async def test_ends_are_counted_by_how_and_faults_by_code(world: World) -> None:
    await world.hand_over("nan-1")
    await world.ended("nan-1")
    world.runner.gate.clear()
    await world.hand_over("a", max_tokens=200)
    await until(world.runner.in_pass.is_set)
    world.worker.cancel(SequenceKey("a"))
    world.runner.gate.set()
    await world.idle()
    world.runner.gate.clear()
    await world.hand_over("b", deadline_s=0.05, max_tokens=200)
    await world.ended("b")
    world.runner.gate.set()
    grant = await world.worker.lease(ask("c", 2))
    world.worker.on_lost(grant.region.lease_id, grant.region.epoch, PeerLost("its sender is gone"))
    await world.idle()
    found = shown(world)
    outcomes = ("finished", "handed_over", "cancelled", "error")
    assert [found[f"worker_sequences_total{{decode,m,{outcome}}}"] for outcome in outcomes] == [0, 0, 1, 2]
    faults = {name: num for name, num in found.items() if name.startswith("worker_faults")}
    assert faults == {
        "worker_faults_total{decode,m,internal_error}": 1,
        "worker_faults_total{decode,m,deadline_exceeded}": 1,
        "worker_faults_total{decode,m,peer_lost}": 1,
    }


@pytest.mark.parametrize("bytes_per_s", [FAST, 0.0])
async def test_a_preemption_is_counted_under_both_its_names(world: World, bytes_per_s: float) -> None:
    world.worker.offering.speed.bytes_per_s = bytes_per_s
    others = await preempted(world)
    given = int(bool(bytes_per_s))
    found = shown(world)
    assert [found["preemptions_total{given}"], found["preemptions_total{left}"]] == [given, 1 - given]
    assert found["worker_preemptions_total{decode,m,offload}"] == given
    assert found["worker_preemptions_total{decode,m,recompute}"] == 1 - given
    await goes_on(world, others)


@given(st.lists(st.floats(0, 1e6), max_size=200))
def test_a_quantile_of_gaps_is_a_gap_that_so_many_do_not_exceed(times: list[float]) -> None:
    times.sort()
    gaps = [after - before for before, after in pairwise(times)]
    found = stay.gap_quantiles(times)
    assert len(found) == (3 if gaps else 0)
    for p in (50, 90, 99) if gaps else ():
        value = found[f"distserve.decode.itl_p{p}_s"]
        assert value in gaps
        assert sum(gap <= value for gap in gaps) >= len(gaps) * p / 100
        assert sum(gap < value for gap in gaps) < len(gaps) * p / 100


async def test_where_nothing_is_traced_nothing_is_told_and_no_stay_begins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*of: object, **more: object) -> None:
        raise AssertionError("nothing is traced")

    for module, name in ((record, "begin"), (record, "Stay"), (stay, "stage"), (stay, "finish")):
        monkeypatch.setattr(module, name, never)
    await world.hand_over("a")
    world.submit("b", [3] * 100)
    await world.ended("a", "b")
    await world.idle()
    assert not world.worker._record.untold
