"""Prefill scheduling: in time order or in that of arrival, in chunks, within the pool."""

import math
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.messages import PassSpeed, Priority, Slo
from distserve.worker.pass_model import PassModel
from distserve_prefill.job import Job
from distserve_prefill.order import PRIORITIES, Rules
from distserve_prefill.shares import LAG_PASSES
from tests.unit.prefill.clockwork import BLOCK, WEIGHTS, Clockwork, known

FEW = PassSpeed(pass_s=0.05, token_s=0.001)  # the longest passes are the best
VIP = Slo(priority="vip", ttft_s=1.0)


def unknown(
    policy: Literal["slo", "fcfs"] = "slo", num_blocks: int = 100, max_batch_tokens: int = 256, chunk_tokens: int = 64
) -> Clockwork:
    """Nobody knows how long passes take: they take no time."""
    return Clockwork(
        policy=policy,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        chunk_tokens=chunk_tokens,
        model=PassModel(),
    )


both = pytest.mark.parametrize("policy", ["slo", "fcfs"])


# ---------------------------------------------------------------- with either policy


@both
def test_a_long_prompt_is_cut_and_short_ones_share_its_passes(policy: Literal["slo", "fcfs"]) -> None:
    w = unknown(policy, max_batch_tokens=96, chunk_tokens=64)
    w.add(150, "long")
    w.add(20, "short")
    assert w.run() == [("long", 0, 64), ("short", 0, 20)]
    assert w.run() == [("long", 64, 64)]
    assert w.run() == [("long", 128, 22)]
    assert w.run() == []


@both
def test_without_chunking_a_prompt_longer_than_the_budget_runs_alone(policy: Literal["slo", "fcfs"]) -> None:
    w = unknown(policy, max_batch_tokens=64, chunk_tokens=0)
    for name, n in (("a", 30), ("b", 200), ("c", 30)):
        w.add(n, name)
    assert w.run() == [("a", 0, 30)]
    assert w.run() == [("b", 0, 200)]
    assert w.run() == [("c", 0, 30)]


@both
def test_blocks_that_are_not_free_yet_hold_the_next_prompt_back(policy: Literal["slo", "fcfs"]) -> None:
    w = unknown(policy, num_blocks=4)
    held = w.pool.allocate(4)  # a hand-over's
    w.add(16, "next")
    assert w.run() == []
    w.pool.free(held)
    assert w.run() == [("next", 0, 16)]


@both
def test_nobody_takes_the_blocks_that_the_first_in_order_waits_for(policy: Literal["slo", "fcfs"]) -> None:
    w = unknown(policy, num_blocks=10)
    held = w.pool.allocate(4)
    w.add(160, "first")
    w.add(16, "second")
    assert w.run() == [], "there is room for the second"
    w.pool.free(held)
    assert w.run() == [("first", 0, 64)]


@both
def test_a_removed_job_is_scheduled_no_more(policy: Literal["slo", "fcfs"]) -> None:
    w = unknown(policy)
    a = w.add(100, "a")
    w.add(10, "b")
    w.run()
    w.scheduler.remove(a)
    assert w.run() == []
    w.scheduler.remove(a)  # again: no effect


# ---------------------------------------------------------------- by when it is due


def test_an_urgent_short_prompt_enters_between_two_chunks_of_a_long_one() -> None:
    w = Clockwork(max_batch_tokens=64, chunk_tokens=64, model=known(FEW))
    w.add(32_768, "long")
    assert w.run() == [("long", 0, 64)]
    w.add(60, "urgent", VIP)
    assert w.run() == [("urgent", 0, 60)]
    assert w.run() == [("long", 64, 64)], "it has kept its blocks"


def test_with_first_come_first_served_it_waits_for_the_long_one() -> None:
    w = Clockwork(policy="fcfs", max_batch_tokens=64, chunk_tokens=64, model=known(FEW))
    w.add(200, "long")
    w.run()
    w.add(60, "urgent", VIP)
    assert [w.run()[0][0] for _ in range(4)] == ["long", "long", "long", "urgent"]


def test_what_an_urgent_prompt_leaves_of_a_pass_goes_to_the_next_in_order() -> None:
    w = Clockwork(max_batch_tokens=128, chunk_tokens=64, model=known(FEW))
    w.add(640, "long")
    w.run()
    w.add(60, "urgent", VIP)
    assert w.run() == [("urgent", 0, 60), ("long", 64, 64)]


@pytest.mark.parametrize("slo", [Slo(), Slo(priority="vip", ttft_s=2.0), Slo(priority="batch")])
def test_among_equals_the_first_to_come_goes_first(slo: Slo) -> None:
    w = Clockwork(max_batch_tokens=64, chunk_tokens=64, model=known(FEW))
    for i in range(8):
        w.add(64, str(i), slo)
        w.now += 0.001
    assert [w.run()[0][0] for _ in range(8)] == [str(i) for i in range(8)]


def test_equals_that_come_at_the_same_moment_go_in_the_order_in_which_they_joined() -> None:
    w = Clockwork(max_batch_tokens=64, chunk_tokens=64, model=known(FEW))
    for i in range(8):
        w.add(64, str(i))
    assert [w.run()[0][0] for _ in range(8)] == [str(i) for i in range(8)]


def test_batch_work_does_not_stand_in_the_way_of_a_vip() -> None:
    w = Clockwork(max_batch_tokens=64, chunk_tokens=64, model=known(FEW))
    for i in range(20):
        w.add(200, f"batch-{i}", Slo(priority="batch"))
    w.run()
    w.add(64, "vip", Slo(priority="vip"))
    assert w.run() == [("vip", 0, 64)]


def test_one_that_is_late_lets_those_pass_that_are_not() -> None:
    w = Clockwork(max_batch_tokens=64, chunk_tokens=64, model=known(FEW))
    w.add(640, "late", Slo(ttft_s=0.5))  # takes over a second
    w.now += 0.1
    w.add(64, "in time", Slo(ttft_s=0.5))
    assert w.run() == [("in time", 0, 64)]


def test_one_that_is_late_is_not_passed_over_for_ever() -> None:
    w = Clockwork(max_batch_tokens=64, chunk_tokens=64, model=known(FEW))
    w.add(320, "late", Slo(priority="vip", ttft_s=0.01))
    due = w.now + 1 + 4 * w.scheduler._rules().alone_s(w.model.speed, 320, 0)
    for i in range(200):  # a stream of prompts that are in time and take all there is
        w.add(64, str(i), Slo(priority="vip", ttft_s=0.3))
        w.run()
        if "late" in w.ended:
            break
    assert due < w.ended["late"] < due + 1


# ---------------------------------------------------------------- whatever comes


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    budget=st.integers(BLOCK, 512),
    chunk=st.sampled_from([0, 16, 48, 64, 256]),
    policy=st.sampled_from(["slo", "fcfs"]),
)
def test_every_prompt_is_computed_exactly_once_and_chunks_end_on_block_edges(
    sizes: list[int], budget: int, chunk: int, policy: Literal["slo", "fcfs"]
) -> None:
    w = unknown(policy, num_blocks=20, max_batch_tokens=budget, chunk_tokens=chunk)
    for i, num in enumerate(sizes):
        w.add(num, str(i))
    seen = {str(i): 0 for i in range(len(sizes))}
    while rows := w.run():
        assert sum(n for _, _, n in rows) <= budget or len(rows) == 1
        for name, start, num in rows:
            assert start == seen[name]
            seen[name] += num
            assert seen[name] == sizes[int(name)] or seen[name] % BLOCK == 0
        w.pool.check()
    assert seen == {str(i): num for i, num in enumerate(sizes)}
    assert w.pool.num_free == 20


SLOS = st.builds(Slo, priority=st.sampled_from(PRIORITIES), ttft_s=st.sampled_from([None, -1.0, 0.05, 0.4, 3.0]))


@settings(deadline=None, max_examples=200)
@given(
    coming=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 320), SLOS), min_size=1, max_size=30),
    given_up=st.dictionaries(st.integers(0, 29), st.integers(0, 20), max_size=8),
    budget=st.sampled_from([16, 50, 64, 256]),
    chunk=st.sampled_from([0, 16, 48, 256]),
    pause=st.integers(0, 4),
    policy=st.sampled_from(["slo", "fcfs"]),
    known_speed=st.booleans(),
)
def test_in_a_small_pool_nothing_is_lost_doubled_or_stuck(
    coming: list[tuple[int, int, Slo]],
    given_up: dict[int, int],
    budget: int,
    chunk: int,
    pause: int,
    policy: Literal["slo", "fcfs"],
    known_speed: bool,
) -> None:
    """Prompts come, hold their blocks for some passes after they are computed, and are given up at any stage."""
    model = known(FEW) if known_speed else PassModel()
    w = Clockwork(policy=policy, num_blocks=24, max_batch_tokens=budget, chunk_tokens=chunk, model=model)
    s = w.scheduler
    jobs: dict[int, Job] = {}
    seen: dict[Job, int] = {}
    handed: list[tuple[int, Job]] = []  # until which pass its blocks are kept
    gone: set[int] = set()
    computed: set[int] = set()
    pending = list(enumerate(coming))
    num_passes = 0
    while pending or s.waiting or s.started or handed:
        while pending and pending[0][1][0] <= num_passes // 2:
            i, (_, num, slo) = pending.pop(0)
            jobs[i] = w.add(num, str(i), slo)
            seen[jobs[i]] = 0
        none_handed = not handed
        batch, in_pass = s.next_batch()
        assert len(set(in_pass)) == len(in_pass), "one work for a sequence in a pass"
        assert batch.num_tokens <= budget or (len(in_pass) == 1 and not chunk)
        w.now += w.model.speed.seconds(batch.num_tokens)
        for work, job in zip(batch.work, in_pass, strict=True):
            assert (work.sequence, work.start) == (job.sequence, seen[job])
            assert len(job.sequence.block_table) * BLOCK >= len(job.sequence.token_ids), "the whole prompt's"
            seen[job] += work.num_tokens
            assert work.samples == (seen[job] == len(job.sequence.token_ids))
            s.computed(job, work.num_tokens)
            if work.samples:
                handed.append((num_passes + pause, job))
                computed.add(int(job.key.request_id))
        for i, at in given_up.items():
            if at == num_passes and i in jobs and i not in computed | gone:
                s.remove(jobs[i])
                w.pool.free(jobs[i].sequence.block_table)
                jobs[i].sequence.block_table = []
                gone.add(i)
        for until, job in list(handed):
            if until <= num_passes:
                w.pool.free(job.sequence.block_table)
                handed.remove((until, job))
        w.pool.check()
        owners = [*s.started, *(job for _, job in handed)]
        assert w.pool.num_used == sum(len(job.sequence.block_table) for job in owners)
        assert not any(job.sequence.block_table for job in s.waiting)
        if not batch.work and none_handed and not pending:
            assert not s.waiting, "nothing can come any more that would let them go on"
        num_passes += 1
        assert num_passes < 10_000
    assert computed | gone == set(range(len(coming)))
    assert w.pool.num_used == 0
    assert not s._shares._num


@settings(deadline=None)
@given(
    coming=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200), SLOS), min_size=1, max_size=30),
    chunk=st.sampled_from([16, 64, 256]),
)
def test_but_for_what_flows_are_owed_nobody_is_served_while_one_before_him_in_order_wants_more(
    coming: list[tuple[int, int, Slo]], chunk: int
) -> None:
    """With this, newcomers being due later and later, nobody starves."""
    w = Clockwork(max_batch_tokens=64, chunk_tokens=chunk, model=known(FEW))
    s = w.scheduler
    pending, num_passes = list(coming), 0
    while pending or s.waiting or s.started:
        while pending and pending[0][0] <= num_passes // 4:
            _, num, slo = pending.pop(0)
            w.add(num, str(len(pending)), slo)
        num_passes += 1
        owed = s._shares.owed(64)
        ahead = {place.arrived: place.left for place in s._jobs}
        rows = {name: num for name, _, num in w.begin()}
        places = sorted(s._jobs, key=Rules(True, 64, chunk, BLOCK).key)
        wanting = None
        for place in places:
            taken = rows.get(s._jobs[place].key.request_id, 0)
            if wanting is not None and not owed:
                assert taken < BLOCK, f"{wanting} wants more"
            if taken < min(chunk, ahead[place.arrived]) and wanting is None:
                wanting = place
        if rows:
            w.end()


@settings(deadline=None, max_examples=30)
@given(
    priority=st.sampled_from(PRIORITIES),
    num=st.integers(1, 400),
    flood=st.lists(st.tuples(st.sampled_from(PRIORITIES), st.integers(1, 200)), min_size=1, max_size=8),
)
def test_however_urgent_what_comes_later_is_one_is_computed_soon_after_it_is_due(
    priority: Priority, num: int, flood: list[tuple[Priority, int]]
) -> None:
    """From its due on nothing that comes goes before it in its flow, and its flow gets its share, less what it may
    lag."""
    w = Clockwork(max_batch_tokens=64, chunk_tokens=64, model=known(FEW))
    key = Rules(fair=True, pass_tokens=64, chunk_tokens=64, block_size=BLOCK).key
    place = w.add(num, "one", Slo(priority=priority)).place
    assert place is not None
    num_passes, latest = 0, math.inf
    while "one" not in w.ended:
        kind, length = flood[num_passes % len(flood)]
        w.add(length, str(num_passes), Slo(priority=kind, ttft_s=0.2))
        if latest == math.inf and w.now >= place.due:
            before = sum(p.left for p in w.scheduler._jobs if p.flow == place.flow and key(p) <= key(place))
            parts = sum(WEIGHTS.values()) / WEIGHTS[priority]
            num_tokens = parts * (before + (LAG_PASSES + 1) * 64 + 3 * BLOCK)
            latest = w.now + (num_tokens / 64 + 1) * FEW.seconds(64)
        w.run()
        num_passes += 1
        assert w.now <= latest
