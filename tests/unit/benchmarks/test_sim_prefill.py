"""The prefill scheduler in virtual time: what comes out is what the code that serves decides."""

import statistics
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.all_rows import sim_rows
from benchmarks.sim.figures import PRIORITIES, figures
from benchmarks.sim.machines import GPU_8B, Machine
from benchmarks.sim.prefill import SIDES, Outcome, Worker
from benchmarks.sim.report import bound_tokens
from benchmarks.sim.traces import Arrival, prompts
from benchmarks.sim.world import Side
from distserve.messages import PassSpeed, Slo

FCFS = Side("fcfs", "fcfs")
# A pass takes 1 s and 10 ms a token; 64 tokens at most.
SLOW = Machine("slow", PassSpeed(pass_s=1.0, token_s=0.01), PassSpeed(pass_s=1.0), max_batch_tokens=64, chunk_tokens=64)


def played(side: Side, trace: list[Arrival], machine: Machine = GPU_8B) -> list[Outcome]:
    return Worker(machine, side).play(trace).outcomes


def test_first_come_first_served_as_reckoned_by_hand() -> None:
    """a: 0 to 1.64 s. Then b (32) and half of c in one pass, to 3.28, then the other half, to 4.60."""
    trace = [Arrival(0.0, 64), Arrival(0.5, 32), Arrival(0.6, 64), Arrival(100.0, 16)]
    found = Worker(SLOW, FCFS, jitter=0.0).play(trace).outcomes
    assert [o.arrival for o in found] == trace
    assert [o.first_token_s for o in found] == pytest.approx([1.64, 3.28, 4.60, 101.16])
    assert [o.began_s for o in found] == pytest.approx([0.0, 1.64, 1.64, 100.0])


@pytest.mark.parametrize("side", SIDES, ids=[s.name for s in SIDES])
def test_the_same_seed_gives_the_same_run(side: Side) -> None:
    trace = prompts(GPU_8B, 1.1, 400, 3)
    assert played(side, trace) == played(side, trace)


@pytest.mark.parametrize("side", SIDES, ids=[s.name for s in SIDES])
@pytest.mark.parametrize("load", [0.5, 1.2])
def test_every_prompt_ends_once_and_none_before_it_could(side: Side, load: float) -> None:
    trace = prompts(GPU_8B, load, 500, 4, bursts=True)
    found = played(side, trace)
    assert sorted((o.arrival for o in found), key=lambda a: a.at_s) == trace
    for o in found:
        if not o.refused:
            assert o.arrival.at_s <= o.began_s < o.first_token_s
            assert o.ttft_s > 0.5 * GPU_8B.prefill.seconds(o.arrival.num_tokens)
    assert side.admission or not any(o.refused for o in found)


ARRIVALS = st.builds(
    Arrival,
    at_s=st.floats(0.0, 1.0),
    num_tokens=st.integers(1, 20_000),
    slo=st.builds(Slo, priority=st.sampled_from(PRIORITIES), ttft_s=st.none() | st.floats(0.01, 3.0)),
)


@given(st.lists(ARRIVALS, max_size=25), st.sampled_from(SIDES))
@settings(deadline=None)
def test_whatever_comes_ends_once(trace: list[Arrival], side: Side) -> None:
    trace = sorted(trace, key=lambda a: a.at_s)
    found = played(side, trace)
    assert Counter(o.arrival for o in found) == Counter(trace)
    refused = [o for o in found if o.refused]
    assert all(side.admission and o.arrival.slo.ttft_s is not None for o in refused)


@pytest.mark.parametrize("side", SIDES, ids=[s.name for s in SIDES])
def test_prompts_present_over_time_are_their_stays(side: Side) -> None:
    """Little's law: the mean number present is the rate times the mean stay."""
    run = Worker(GPU_8B, side).play(prompts(GPU_8B, 0.9, 500, 5))
    assert run.present_s == pytest.approx(sum(o.ttft_s for o in run.outcomes if not o.refused))


def test_waits_of_equal_prompts_are_those_of_queueing_theory() -> None:
    """One prompt a pass, Poisson arrivals: load / (2 (1 - load)) passes, by Pollaczek and Khinchine."""
    one = replace(SLOW, max_batch_tokens=64)
    pass_s, load, num = 1.64, 0.7, 6000
    times = [a.at_s for a in prompts(GPU_8B, 1.0, num, 6)]
    trace = [Arrival(t / times[-1] * num * pass_s / load, 64) for t in times]
    found = Worker(one, FCFS, jitter=0.0).play(trace).outcomes
    assert statistics.mean(o.wait_s for o in found) == pytest.approx(load / (2 * (1 - load)) * pass_s, rel=0.15)


def test_an_urgent_prompt_need_not_wait_for_long_ones() -> None:
    promise = Slo(priority="vip", ttft_s=1.0)
    trace = [*[Arrival(0.0, 30_000)] * 20, Arrival(0.1, 100, slo=promise)]
    late, soon = ({o.arrival.num_tokens: o.ttft_s for o in played(side, trace)}[100] for side in SIDES[:2])
    assert soon < 1.0 < late


def test_flows_that_always_have_work_get_their_weights_share_but_for_the_bound() -> None:
    fcfs, slo = (Worker(GPU_8B, side).saturate(1_000_000) for side in SIDES[:2])
    assert slo.shares.worst_lag <= bound_tokens(slo.pass_tokens) < fcfs.shares.worst_lag
    assert len(slo.shares.had) == 12
    for flow, due in slo.shares.due.items():
        assert slo.shares.had[flow] >= due - bound_tokens(slo.pass_tokens)
    assert slo.shares.jain > fcfs.shares.jain


def test_figures_count_refused_ones_as_not_kept() -> None:
    promise = Slo(priority="vip", ttft_s=1.0)
    run = Worker(GPU_8B, FCFS).run
    run.outcomes = [
        Outcome(Arrival(0.0, 100, slo=promise), 0.2, 0.5),
        Outcome(Arrival(0.0, 100, slo=promise), 0.9, 1.5),
        Outcome(Arrival(0.0, 100, slo=promise)),
        Outcome(Arrival(0.0, 4000), 8.0, 9.0),
    ]
    run.ended_s = 10.0
    found = figures([run], GPU_8B, 1.0)
    assert found.kept == pytest.approx(1 / 3)
    assert found.kept_of_accepted == 0.5
    assert found.refused == pytest.approx(1 / 3)
    assert found.kept_by_bucket["<= 512"] == pytest.approx(1 / 3)
    assert found.goodput == pytest.approx((GPU_8B.work_s(100) + GPU_8B.work_s(4000)) / 10)
    assert found.unpromised_ttft_s["normal"] == [9.0, 9.0, 9.0]
    assert found.longest_wait_s == {"vip": 0.9, "normal": 8.0, "batch": 0.0}
    [row] = sim_rows({"8b-gpu": {"prefill": [found.as_json()], "decode": []}})
    assert row.what == "simulated, 8b-gpu, load 1, fcfs"
    goodput = f"{100 * found.goodput:.0f}"
    assert row.figure == f"promises kept 33.3 %, goodput {goodput} %, TTFT P99 up to 512 tokens 1.49 s"
