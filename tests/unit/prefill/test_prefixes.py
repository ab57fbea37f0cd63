"""Which blocks of a prompt are had from the pool, when they are looked for, and when they get their names."""

import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import SamplingParams, SequenceKey, Slo, SubmitRequest, num_blocks_for
from distserve.worker.pass_model import PassModel
from distserve.worker.prefixes import Prefixes
from distserve_prefill.job import Job
from distserve_prefill.scheduler import Scheduler
from tests.unit.prefill.clockwork import WEIGHTS
from tests.unit.worker.fakes import LAYOUT

BLOCK = 16
LONG = random.Random(1).choices(range(1000), k=400)


class World:
    """Scheduler and pool; a pass computes nothing, and names what it would have computed."""

    def __init__(
        self,
        num_blocks: int = 100,
        *,
        budget: int = 1024,
        chunk: int = 64,
        keep: bool = True,
        policy: Literal["slo", "fcfs"] = "slo",
    ) -> None:
        self.pool = BlockPool(num_blocks + 1, keep=keep)
        self.prefixes = Prefixes(self.pool, LAYOUT, keep=keep)
        self.scheduler = Scheduler(
            self.pool,
            self.prefixes,
            block_size=BLOCK,
            max_batch_tokens=budget,
            chunk_tokens=chunk,
            policy=policy,
            weights=WEIGHTS,
            model=PassModel(),
        )

    def job(
        self,
        token_ids: list[int],
        name: str = "r",
        *,
        salt: str = "",
        prompt_logprobs: int | None = None,
        slo: Slo = Slo(),
    ) -> Job:
        key = SequenceKey(name)
        sampling = SamplingParams(max_tokens=8, prompt_logprobs=prompt_logprobs)
        request = SubmitRequest(
            key=key,
            model="m",
            gateway="g",
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            cache_salt=salt,
            slo=slo,
        )
        sequence = Sequence(key, list(token_ids), len(token_ids), sampling, chain=self.prefixes.chain_of(request))
        return Job(request, sequence, deadline=float("inf"))

    def add(self, token_ids: list[int], name: str = "r", **how: object) -> Job:
        job = self.job(token_ids, name, **how)  # type: ignore[arg-type]
        self.scheduler.add(job)
        return job

    def run(self) -> list[tuple[str, int, int]]:
        """One pass: (name, start, num_tokens) of each work."""
        batch, jobs = self.scheduler.next_batch()
        for work, job in zip(batch.work, jobs, strict=True):
            self.scheduler.computed(job, work.num_tokens)
            self.prefixes.name(job.sequence)
        self.pool.check()
        return [(j.key.request_id, w.start, w.num_tokens) for w, j in zip(batch.work, jobs, strict=True)]

    def release(self, *jobs: Job) -> None:
        for job in jobs:
            self.pool.free(job.sequence.block_table)
            job.sequence.block_table = []

    def serve(self, token_ids: list[int], **how: object) -> Job:
        """Alone, from its beginning to its end."""
        job = self.add(token_ids, **how)
        while job.sequence.num_uncomputed_tokens:
            assert self.run()
        self.release(job)
        return job


def test_the_last_token_is_always_computed_and_hits_are_whole_blocks() -> None:
    for num in (1, 15, 16, 17, 31, 32, 33, 48, 100):
        w = World()
        assert w.serve(LONG[:num]).sequence.num_cached_tokens == 0
        again = w.serve(LONG[:num]).sequence
        assert again.num_cached_tokens == (num - 1) // BLOCK * BLOCK, num
        assert w.pool.num_used == 0


def test_a_hit_ends_where_the_prompts_part() -> None:
    w = World()
    w.serve(LONG[:100])
    other = [*LONG[:40], 7, *LONG[41:100]]
    assert w.serve(other).sequence.num_cached_tokens == 32
    assert w.serve(LONG[:64] + [7] * 5).sequence.num_cached_tokens == 64
    assert w.serve([*LONG[1:100], 7]).sequence.num_cached_tokens == 0


def test_only_equal_salts_share() -> None:
    w = World()
    w.serve(LONG[:100], salt="a")
    assert w.serve(LONG[:100], salt="b").sequence.num_cached_tokens == 0
    assert w.serve(LONG[:100]).sequence.num_cached_tokens == 0
    assert w.serve(LONG[:100], salt="a").sequence.num_cached_tokens == 96


def test_with_logprobs_of_the_prompt_all_of_it_is_computed_and_serves_others() -> None:
    w = World()
    w.serve(LONG[:100])
    assert w.serve(LONG[:100], prompt_logprobs=0).sequence.num_cached_tokens == 0
    w = World()
    w.serve(LONG[:100], prompt_logprobs=0)
    assert w.serve(LONG[:100]).sequence.num_cached_tokens == 96


def test_without_the_cache_nothing_is_hashed_named_or_kept() -> None:
    w = World(keep=False)
    first = w.serve(LONG[:100])
    assert first.sequence.chain is None
    assert w.serve(LONG[:100]).sequence.num_cached_tokens == 0
    assert w.pool.num_free == w.pool.num_total


def test_two_that_begin_alike_share_the_blocks_while_both_are_here() -> None:
    w = World(num_blocks=10)
    a = w.add(LONG[:96], "a")
    w.run()
    w.run()
    b = w.add([*LONG[:96], 1, 2], "b")
    assert w.run() == [("b", 96, 2)]
    assert b.sequence.block_table[:6] == a.sequence.block_table
    assert w.pool.num_used == 7
    w.release(a)
    assert w.pool.num_used == 7
    w.release(b)
    assert (w.pool.num_used, w.pool.num_cached) == (0, 6)


def test_the_pool_is_looked_at_when_a_prompts_turn_has_come() -> None:
    """What waited behind another one finds what that one has computed meanwhile, and so does its pass's leftover."""
    w = World(budget=72, chunk=0)
    w.add(LONG[:64], "a")
    b = w.add(LONG[:70], "b")
    assert w.run() == [("a", 0, 64)]
    assert (b.sequence.block_table, b.sequence.num_computed_tokens) == ([], 0), "it holds nothing while it waits"
    assert w.run() == [("b", 64, 6)]


def test_of_two_in_one_pass_the_second_copy_gets_no_name() -> None:
    """With logprobs of its prompt, one computes all of it whatever others do."""
    w = World()
    a, b = w.add(LONG[:40], "a"), w.add(LONG[:40], "b", prompt_logprobs=0)
    assert w.run() == [("a", 0, 40), ("b", 0, 40)]
    assert not set(a.sequence.block_table) & set(b.sequence.block_table)
    w.release(b, a)
    assert (w.pool.num_cached, w.pool.num_used) == (2, 0)


def test_outputs_of_one_prompt_that_come_together_compute_it_once() -> None:
    w = World()
    for name in "abc":
        w.add(LONG[:140], name)
    assert w.run() == [("a", 0, 64)]
    assert w.scheduler.num_spoken_for == 0, "they will find what they wait for"
    assert w.run() == [("a", 64, 64)]
    assert w.run() == [("a", 128, 12), ("b", 128, 12), ("c", 128, 12)], "from where nobody computes for them"


def test_one_that_parts_from_a_prompt_under_way_waits_up_to_there_and_no_longer() -> None:
    w = World()
    w.add(LONG[:300], "long")
    w.add(LONG[:80] + [7] * 40, "parts")
    assert w.run() == [("long", 0, 64)]
    assert w.run() == [("long", 64, 64)]
    assert w.run() == [("long", 128, 64), ("parts", 80, 40)]


@pytest.mark.parametrize(
    ("policy", "last"),
    [("slo", [("b", 80, 16), ("later", 64, 64)]), ("fcfs", [("later", 64, 64), ("b", 80, 16)])],
)
def test_one_that_is_held_back_holds_up_nobody_and_keeps_its_place(
    policy: Literal["slo", "fcfs"], last: list[tuple[str, int, int]]
) -> None:
    w = World(budget=128, policy=policy)
    w.add(LONG[:96], "a")
    w.add(LONG[:96], "b")
    w.add([5] * 30, "other")
    assert w.run() == [("a", 0, 64), ("other", 0, 30)]
    w.add([6] * 200, "later")
    assert w.run() == [("a", 64, 32), ("later", 0, 64)], "b lacks what a is computing"
    assert w.run() == last


def test_an_urgent_one_that_is_held_back_by_one_that_can_wait_has_that_one_computed_in_its_stead() -> None:
    w = World(budget=64)
    w.add(LONG[:300], "can wait", slo=Slo(priority="batch"))
    assert w.run() == [("can wait", 0, 64)]
    w.add([5] * 100, "before it", slo=Slo(priority="vip"))
    assert w.run() == [("before it", 0, 64)]
    urgent = w.add(LONG[:200], "urgent", slo=Slo(priority="vip", ttft_s=0.5))
    assert w.run() == [("can wait", 64, 64)]
    assert w.run() == [("can wait", 128, 64)]
    assert w.run() == [("urgent", 192, 8), ("before it", 64, 36), ("can wait", 192, 16)]
    assert urgent.sequence.num_cached_tokens == 192


def test_what_was_held_back_is_computed_when_that_one_is_given_up() -> None:
    w = World()
    a = w.add(LONG[:140], "a")
    w.add(LONG[:140], "b")
    assert w.run() == [("a", 0, 64)]
    w.scheduler.remove(a)
    w.release(a)
    assert w.run() == [("b", 64, 64)]


def test_one_finds_what_came_from_elsewhere_while_another_computes_the_same() -> None:
    w = World()
    a = w.add(LONG[:140], "a")
    assert w.run() == [("a", 0, 64)]
    assert a.sequence.chain is not None
    fetched = w.pool.allocate(4)
    w.pool.name(fetched, a.sequence.chain.hashes[4:8])
    w.add(LONG[:140], "b")
    assert w.run() == [("a", 64, 64), ("b", 128, 12)]
    w.pool.free(fetched)


def test_a_prompt_for_which_there_is_no_room_keeps_no_hits_from_the_others() -> None:
    w = World(num_blocks=8)
    w.serve(LONG[:64])  # four cached
    holding = w.add([5] * 40, "holding")  # three of the other four
    w.run()
    waiting = w.add(LONG[:64] + [7] * 32, "waiting")  # four hits and two more
    assert w.run() == []
    assert waiting.sequence.block_table == []
    assert w.pool.num_used == 3
    w.release(holding)
    assert w.run() == [("waiting", 64, 32)]


def test_in_order_of_arrival_wherever_it_was_meanwhile() -> None:
    w = World(budget=16)
    first, second, third = (w.job([i] * 10, name) for i, name in enumerate(("first", "second", "third")))
    w.scheduler.add(third)
    w.scheduler.add(first)
    w.scheduler.add(second)
    assert [j.key.request_id for j in w.scheduler.waiting] == ["first", "second", "third"]


def test_cached_blocks_make_room_from_the_end_of_the_longest_unused_chain() -> None:
    w = World(num_blocks=8)
    w.serve(LONG[:64])  # a chain of four
    w.serve([5] * 64)
    w.serve(LONG[:64])  # used again: of the other chain three stay, since the last block was computed again
    w.serve([6] * 32)
    assert w.serve([*LONG[:64], 9]).sequence.num_cached_tokens == 64
    assert w.serve([*[5] * 64, 9]).sequence.num_cached_tokens < 64


@settings(deadline=None)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=30),
    num_blocks=st.integers(24, 60),
    budget=st.integers(BLOCK, 300),
    chunk=st.sampled_from([0, 16, 48, 256]),
    pause=st.integers(0, 4),
    policy=st.sampled_from(["slo", "fcfs"]),
)
def test_what_is_found_is_what_was_computed(
    cuts: list[tuple[int, int, int]],
    num_blocks: int,
    budget: int,
    chunk: int,
    pause: int,
    policy: Literal["slo", "fcfs"],
) -> None:
    """However prompts begin alike and blocks come and go: a hit holds just the tokens that it stands for."""
    w = World(num_blocks, budget=budget, chunk=chunk, policy=policy)
    slos = [Slo(priority="vip", ttft_s=0.5), Slo(), Slo(priority="batch", ttft_s=-1.0)]
    holds: dict[int, tuple[int, ...]] = {}  # block -> the tokens up to its end, as last written
    todo = [w.add([salt] + LONG[:n] + [2000 + i] * m, str(i), slo=slos[m % 3]) for i, (salt, n, m) in enumerate(cuts)]
    released: list[Job] = []
    waiting: list[Job] = []  # computed, handed over `pause` passes later
    for _ in range(10_000):
        batch, jobs = w.scheduler.next_batch()
        for work, job in zip(batch.work, jobs, strict=True):
            s = job.sequence
            assert len(s.block_table) == num_blocks_for(len(s.token_ids), BLOCK)
            for i in range(work.start // BLOCK):  # what is not computed now is there
                assert holds[s.block_table[i]] == tuple(s.token_ids[: (i + 1) * BLOCK])
            for i in range(work.start // BLOCK, num_blocks_for(work.start + work.num_tokens, BLOCK)):
                assert sum(s.block_table[i] in other.sequence.block_table for other in todo) == 1, "written by one"
                holds[s.block_table[i]] = tuple(s.token_ids[: (i + 1) * BLOCK])
            w.scheduler.computed(job, work.num_tokens)
            w.prefixes.name(s)
            if not s.num_uncomputed_tokens:
                waiting.append(job)
        w.pool.check()
        if waiting and (len(waiting) > pause or not batch.work):
            w.release(waiting[0])
            released.append(waiting.pop(0))
        if len(released) == len(todo):
            break
    assert len(released) == len(todo)
    assert w.pool.num_used == 0
