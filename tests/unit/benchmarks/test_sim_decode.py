"""The decode scheduler in virtual time."""

import pytest

from benchmarks.sim.decode import Decoder, steps
from benchmarks.sim.machines import GPU_8B, SMOLLM2, Machine
from benchmarks.sim.traces import Arrival, answers
from benchmarks.sim.world import Policy
from distserve.messages import PassSpeed

POLICIES: tuple[Policy, ...] = "fcfs", "slo"
# A step takes 1 s and 0.1 s for each sequence in it.
SLOW = Machine("slow", PassSpeed(pass_s=1.0), PassSpeed(pass_s=1.0, token_s=0.1), max_num_seqs=2)


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_as_reckoned_by_hand(policy: Policy) -> None:
    """a alone from 0 to 1.1 s; b joins: both to 2.3 s, where a has its 3 tokens; b alone to 3.4 s. c comes when all is
    over."""
    trace = [Arrival(0.0, 20, 3), Arrival(0.5, 20, 3), Arrival(50.0, 20, 2)]
    worker = Decoder(SLOW, policy, jitter=0.0)
    worker.play(trace)
    assert [e.arrival for e in worker.ended] == trace
    assert [e.last_token_s for e in worker.ended] == pytest.approx([2.3, 3.4, 51.1])
    assert [e.tpot_s for e in worker.ended] == pytest.approx([1.15, 1.15, 1.1])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_answer_ends_once_with_all_its_tokens(policy: Policy) -> None:
    trace = answers(SMOLLM2, 1.1, 60, 2)
    worker = Decoder(SMOLLM2, policy)
    worker.play(trace)
    assert sorted((e.arrival for e in worker.ended), key=lambda a: a.at_s) == trace
    assert all(e.taken_s >= e.arrival.at_s for e in worker.ended)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_steps(policy: Policy) -> None:
    trace = answers(SMOLLM2, 0.9, 60, 2)
    first, second, other = (Decoder(SMOLLM2, policy, seed=seed) for seed in (3, 3, 4))
    for worker in (first, second, other):
        worker.play(trace)
    assert first.ended == second.ended != other.ended


def test_first_come_first_served_passes_nobody_over() -> None:
    assert steps(GPU_8B, "fcfs", 1.0, answers(GPU_8B, 1.0, 100, 2)).most_missed == 0
