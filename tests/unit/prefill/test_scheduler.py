"""The prefill queue: decides in microseconds, without a model."""

from hypothesis import given
from hypothesis import strategies as st

from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import SamplingParams, SequenceKey, SubmitRequest
from distserve.worker.prefixes import Prefixes
from distserve_prefill.job import Job
from distserve_prefill.scheduler import Scheduler
from tests.unit.worker.fakes import LAYOUT

BLOCK = 16


def job(num_tokens: int, name: str = "r") -> Job:
    key = SequenceKey(name)
    sampling = SamplingParams(max_tokens=8)
    request = SubmitRequest(
        key=key, model="m", gateway="g", token_ids=[1] * num_tokens, num_prompt_tokens=num_tokens, sampling=sampling
    )
    return Job(request, Sequence(key, list(request.token_ids), num_tokens, sampling), deadline=float("inf"))


def scheduler(num_blocks: int = 100, max_batch_tokens: int = 256, chunk_tokens: int = 64) -> Scheduler:
    pool = BlockPool(num_blocks + 1)
    prefixes = Prefixes(pool, LAYOUT, keep=True)
    return Scheduler(pool, prefixes, block_size=BLOCK, max_batch_tokens=max_batch_tokens, chunk_tokens=chunk_tokens)


def run(s: Scheduler) -> list[tuple[str, int, int]]:
    """One pass: (name, start, num_tokens) of each work."""
    batch, jobs = s.next_batch()
    rows = [(j.key.request_id, w.start, w.num_tokens) for w, j in zip(batch.work, jobs, strict=True)]
    for w, j in zip(batch.work, jobs, strict=True):
        s.computed(j, w.num_tokens)
    return rows


def test_a_long_prompt_is_cut_and_short_ones_share_its_passes() -> None:
    s = scheduler(max_batch_tokens=96, chunk_tokens=64)
    s.add(job(150, "long"))
    s.add(job(20, "short"))
    assert run(s) == [("long", 0, 64), ("short", 0, 20)]
    assert run(s) == [("long", 64, 64)]
    assert run(s) == [("long", 128, 22)]
    assert run(s) == []


def test_without_chunking_a_prompt_longer_than_the_budget_runs_alone() -> None:
    s = scheduler(max_batch_tokens=64, chunk_tokens=0)
    for name, n in (("a", 30), ("b", 200), ("c", 30)):
        s.add(job(n, name))
    assert run(s) == [("a", 0, 30)]
    assert run(s) == [("b", 0, 200)]
    assert run(s) == [("c", 0, 30)]


def test_blocks_still_being_handed_over_hold_the_next_prompt_back() -> None:
    s = scheduler(num_blocks=4)
    first, second = job(64, "first"), job(16, "second")
    s.add(first)
    s.add(second)
    assert run(s) == [("first", 0, 64)]
    assert run(s) == []  # computed, but its blocks aren't free
    s._pool.free(first.sequence.block_table)
    assert run(s) == [("second", 0, 16)]


def test_a_removed_job_is_scheduled_no_more() -> None:
    s = scheduler()
    a, b = job(100, "a"), job(10, "b")
    s.add(a)
    s.add(b)
    run(s)
    s.remove(a)
    assert run(s) == []
    s.remove(a)  # again: no effect


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    budget=st.integers(BLOCK, 512),
    chunk=st.sampled_from([0, 16, 48, 64, 256]),
)
def test_every_prompt_is_computed_exactly_once_and_chunks_end_on_block_edges(
    sizes: list[int], budget: int, chunk: int
) -> None:
    s = scheduler(num_blocks=20, max_batch_tokens=budget, chunk_tokens=chunk)
    jobs = {str(i): job(n, str(i)) for i, n in enumerate(sizes)}
    for j in jobs.values():
        s.add(j)
    seen: dict[str, int] = dict.fromkeys(jobs, 0)
    while rows := run(s):
        assert sum(n for _, _, n in rows) <= budget or len(rows) == 1
        for name, start, num in rows:
            assert start == seen[name]
            seen[name] += num
            assert seen[name] == len(jobs[name].sequence.token_ids) or seen[name] % BLOCK == 0
            if seen[name] == len(jobs[name].sequence.token_ids):
                s._pool.free(jobs[name].sequence.block_table)
        s._pool.check()
    assert seen == {name: len(j.sequence.token_ids) for name, j in jobs.items()}
    assert s._pool.num_free == 20
