"""Made-up requests: drawn alike for equal seeds, with the load and the lengths that were asked for."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sim.machines import GPU_8B, MACHINES, Machine
from benchmarks.sim.traces import LEAST, MOST, answers, pareto, prompts
from distserve.messages import pairs


def test_the_same_seed_gives_the_same_trace_and_another_another() -> None:
    assert prompts(GPU_8B, 0.8, 200, 1) == prompts(GPU_8B, 0.8, 200, 1)
    assert prompts(GPU_8B, 0.8, 200, 1) != prompts(GPU_8B, 0.8, 200, 2)
    assert answers(GPU_8B, 0.8, 200, 1) == answers(GPU_8B, 0.8, 200, 1)


@given(st.integers(), st.integers(1, 100), st.integers(0, 40_000))
def test_lengths_keep_to_their_bounds(seed: int, least: int, more: int) -> None:
    assert least <= pareto(random.Random(seed), least, least + more + 1) <= least + more + 1


def test_lengths_have_a_long_tail() -> None:
    """Of a power law with exponent 0.8, cut off at 32,768: 10.5 % are over 512, 0.8 % over 8,192."""
    rng = random.Random(1)
    drawn = [pareto(rng) for _ in range(50_000)]
    assert statistics.mean(n > 512 for n in drawn) == pytest.approx(0.105, rel=0.05)
    assert statistics.mean(n > 8192 for n in drawn) == pytest.approx(0.008, rel=0.15)
    assert LEAST <= min(drawn) < max(drawn) <= MOST


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("bursts", [False, True])
def test_the_load_is_the_work_over_the_time_in_which_it_comes(machine: Machine, bursts: bool) -> None:
    trace = prompts(machine, 0.75, 2000, 3, bursts=bursts)
    work = sum(machine.work_s(a.num_tokens) for a in trace)
    assert work / trace[-1].at_s == pytest.approx(0.75)
    assert [a.at_s for a in trace] == sorted(a.at_s for a in trace)


def test_full_passes_are_what_a_prompt_is_reckoned_by() -> None:
    """A prompt that fills three passes takes what these do."""
    num = 3 * GPU_8B.max_batch_tokens
    passes = [GPU_8B.prefill.seconds(num // 3, pairs(num // 3, start)) for start in (0, num // 3, 2 * num // 3)]
    assert GPU_8B.work_s(num) == pytest.approx(sum(passes))


def test_bursts_are_denser_than_a_poisson_process() -> None:
    """Arrivals in spans of 50 mean gaps: their variance is near their mean in one, far above it in the other."""

    def dispersion(bursts: bool) -> float:
        trace = prompts(GPU_8B, 1.0, 20_000, 5, bursts=bursts)
        span = 50 * trace[-1].at_s / len(trace)
        counts = [0] * (int(trace[-1].at_s / span) + 1)
        for arrival in trace:
            counts[int(arrival.at_s / span)] += 1
        return statistics.variance(counts) / statistics.mean(counts)

    assert dispersion(False) == pytest.approx(1.0, abs=0.25)
    assert dispersion(True) > 10


def test_longer_prompts_are_promised_more_time_and_some_nothing() -> None:
    trace = prompts(GPU_8B, 1.0, 2000, 7)
    vips = sorted((a.num_tokens, a.slo.ttft_s or 0.0) for a in trace if a.slo.priority == "vip")
    assert [s for _, s in vips] == sorted(s for _, s in vips)
    assert all(s > GPU_8B.alone_s(n) for n, s in vips)
    assert {a.slo.ttft_s for a in trace if a.slo.priority == "batch"} == {None}
    assert None in {a.slo.ttft_s for a in trace if a.slo.priority == "normal"} != {None}
