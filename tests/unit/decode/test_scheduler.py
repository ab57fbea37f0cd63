"""The decode queue: steps for all, chunks beside them, the youngest goes when the pool is full."""

from hypothesis import given
from hypothesis import strategies as st

from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import SamplingParams, SequenceKey, SubmitRequest, num_blocks_for
from distserve.worker.prefixes import Prefixes
from distserve_decode.scheduler import Scheduler
from tests.unit.worker.fakes import LAYOUT

BLOCK = 16


def make(num_blocks: int = 100, max_num_seqs: int = 64, chunk_tokens: int = 64) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks + 1)
    prefixes = Prefixes(pool, LAYOUT, keep=True)
    return Scheduler(pool, prefixes, block_size=BLOCK, max_num_seqs=max_num_seqs, chunk_tokens=chunk_tokens), pool


def misled(s: Scheduler) -> Scheduler:
    """Whose outputs have all been short, so that more begins than has room in the end."""
    for _ in range(16):
        s.lengths.note(1)
    return s


def sequence(name: str, num_tokens: int) -> Sequence:
    return Sequence(SequenceKey(name), [1] * num_tokens, num_tokens, SamplingParams(max_tokens=100))


def adopted(pool: BlockPool, name: str, num_tokens: int) -> Sequence:
    """As after a hand-over: KV of all but token 0."""
    s = sequence(name, num_tokens)
    s.token_ids.append(7)
    s.num_computed_tokens = num_tokens
    s.block_table = pool.allocate(num_blocks_for(num_tokens, BLOCK))
    return s


def step(s: Scheduler) -> dict[str, int]:
    """One pass, each sample a new token: {name: tokens computed}."""
    batch = s.next_batch()
    for w in batch.work:
        assert len(w.sequence.block_table) * BLOCK >= w.start + w.num_tokens
        w.sequence.num_computed_tokens += w.num_tokens
        if w.samples:
            w.sequence.token_ids.append(7)
    return {w.sequence.key.request_id: w.num_tokens for w in batch.work}


def test_every_adopted_sequence_steps_in_every_pass() -> None:
    s, pool = make()
    for i in range(5):
        s.adopt(adopted(pool, str(i), 10 + i))
    assert step(s) == {str(i): 1 for i in range(5)} == step(s)


def test_a_prompt_is_chunked_beside_the_steps_of_others() -> None:
    s, pool = make(chunk_tokens=32)
    s.adopt(adopted(pool, "steady", 20))
    s.submit(sequence("new", 70))
    assert step(s) == {"steady": 1, "new": 32}
    assert step(s) == {"steady": 1, "new": 32}
    assert step(s) == {"steady": 1, "new": 6}
    assert step(s) == {"steady": 1, "new": 1}


def test_a_full_pool_preempts_the_youngest_which_is_recomputed_later() -> None:
    s, pool = make(num_blocks=4)
    old, young = adopted(pool, "old", 31), adopted(pool, "young", 31)
    s.adopt(old)
    s.adopt(young)
    assert step(s) == {"old": 1, "young": 1}  # both tables are full now
    assert step(s) == {"old": 1}
    assert young.block_table == []
    assert (young.num_computed_tokens, young.num_preemptions, len(young.token_ids)) == (0, 1, 33)
    assert step(s) == {"old": 1}  # 2 blocks needed, 1 free
    s.remove(old)
    assert step(s) == {"young": 33}
    assert step(s) == {"young": 1}


def test_max_num_seqs_bounds_the_pass() -> None:
    s, _ = make(max_num_seqs=2, chunk_tokens=1000)
    for i in range(3):
        s.submit(sequence(str(i), 20))
    assert step(s) == {"0": 20, "1": 20}
    s.remove(s.running[0])
    assert step(s) == {"1": 1, "2": 20}


def test_a_prompt_beside_steps_takes_of_a_pass_what_steps_leave_it() -> None:
    s, pool = make(chunk_tokens=256)

    def timed_step() -> dict[str, int]:
        batch = s.next_batch()
        s.note_pass(batch, 0.012 + 0.001 * batch.num_tokens)
        for w in batch.work:
            w.sequence.num_computed_tokens += w.num_tokens
            if w.samples:
                w.sequence.token_ids.append(7)
        return {w.sequence.key.request_id: w.num_tokens for w in batch.work}

    s.submit(sequence("first", 300))
    assert [timed_step() for _ in range(3)] == [{"first": 256}, {"first": 44}, {"first": 1}]
    s.submit(sequence("second", 100))
    # A step takes 13 ms, so 52 are left to it. Of prompts alone, the weights' 12 ms are counted as the tokens' own.
    assert [timed_step()["second"] for _ in range(3)] == [48, 48, 4]
    assert timed_step() == {"first": 1, "second": 1}
    s.adopt(adopted(pool, "third", 20))
    assert timed_step() == {"first": 1, "second": 1, "third": 1}


def named_step(s: Scheduler, prefixes: Prefixes) -> dict[str, tuple[int, int]]:
    """One pass whose outcome is named, as a worker does it: {name: (start, tokens computed)}."""
    batch = s.next_batch()
    for w in batch.work:
        w.sequence.num_computed_tokens += w.num_tokens
        prefixes.name(w.sequence)
        if w.samples:
            w.sequence.token_ids.append(7)
    return {w.sequence.key.request_id: (w.start, w.num_tokens) for w in batch.work}


def chained(prefixes: Prefixes, name: str, token_ids: list[int], max_tokens: int = 100) -> Sequence:
    key, sampling = SequenceKey(name), SamplingParams(max_tokens=max_tokens)
    request = SubmitRequest(
        key=key, model="m", gateway="g", token_ids=token_ids, num_prompt_tokens=len(token_ids), sampling=sampling
    )
    return Sequence(key, list(token_ids), len(token_ids), sampling, chain=prefixes.chain_of(request))


def test_of_what_a_preempted_sequence_left_only_what_is_gone_is_computed_again() -> None:
    pool = BlockPool(8 + 1)
    prefixes = Prefixes(pool, LAYOUT, keep=True)
    s = misled(Scheduler(pool, prefixes, block_size=BLOCK, max_num_seqs=8, chunk_tokens=256))
    first = chained(prefixes, "first", list(range(100, 163)))
    s.submit(first)
    named_step(s, prefixes)
    s.remove(first)
    old, young = chained(prefixes, "old", list(range(31))), chained(prefixes, "young", list(range(100, 163)))
    s.submit(old)
    s.submit(young)
    assert named_step(s, prefixes) == {"old": (0, 31), "young": (48, 15)}
    while not young.num_preemptions:
        named_step(s, prefixes)
    assert (young.block_table, young.num_computed_tokens, young.num_named_blocks) == ([], 0, 0)
    assert len(young.token_ids) == 81
    assert prefixes.num_held_tokens(young) == 64, "of its five full blocks the last has become the old one's next"
    others = pool.allocate(pool.num_free + 1)
    assert prefixes.num_held_tokens(young) == 48, "what goes is its end"
    pool.free(others)
    s.remove(old)
    assert named_step(s, prefixes) == {"young": (48, 33)}
    assert young.num_cached_tokens == 48, "what it left itself was not had from others"


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 120), st.integers(1, 40), st.integers(1, 60)),
        min_size=1,
        max_size=14,
    ),
    num_blocks=st.integers(14, 40),
    chunk=st.sampled_from([16, 64, 200]),
)
def test_what_is_found_is_what_was_computed(
    arrivals: list[tuple[int, int, int, int]], num_blocks: int, chunk: int
) -> None:
    """However prompts begin alike and sequences are preempted: a hit holds just the tokens that it stands for, and what
    somebody else has is never written."""
    pool = BlockPool(num_blocks + 1)
    prefixes = Prefixes(pool, LAYOUT, keep=True)
    s = misled(Scheduler(pool, prefixes, block_size=BLOCK, max_num_seqs=4, chunk_tokens=chunk))
    holds: dict[int, tuple[int, ...]] = {}  # block -> the tokens up to the last one written
    for i, (family, num_shared, num_own, num_out) in enumerate(arrivals):
        s.submit(chained(prefixes, str(i), [family, *range(num_shared), *([1000 + i] * num_own)], num_out))
    ended = 0
    for _ in range(5000):
        batch = s.next_batch()
        if not batch.work:
            break
        for w in batch.work:
            q, stop = w.sequence, w.start + w.num_tokens
            for at in range(w.start):
                assert holds[q.block_table[at // BLOCK]][: at + 1] == tuple(q.token_ids[: at + 1])
            for at in range(w.start, stop):
                block = q.block_table[at // BLOCK]
                assert sum(block in other.block_table for other in s.running) == 1, "written by one"
                holds[block] = tuple(q.token_ids[: at + 1])
        for w in batch.work:
            w.sequence.num_computed_tokens += w.num_tokens
            prefixes.name(w.sequence)
            if w.samples:
                w.sequence.token_ids.append(2000 + w.sequence.num_output_tokens)
        pool.check()
        for q in list(s.running):
            if q.num_output_tokens >= q.sampling.max_tokens:
                s.remove(q)
                ended += 1
    assert ended == len(arrivals)
    assert pool.num_used == 0


@given(
    arrivals=st.lists(st.tuples(st.booleans(), st.integers(1, 120), st.integers(1, 60)), min_size=1, max_size=12),
    num_blocks=st.integers(12, 40),
    chunk=st.sampled_from([16, 64, 200]),
)
def test_every_sequence_ends_and_every_block_comes_back(
    arrivals: list[tuple[bool, int, int]], num_blocks: int, chunk: int
) -> None:
    s, pool = make(num_blocks=num_blocks, chunk_tokens=chunk)
    misled(s)
    todo = list(enumerate(arrivals))
    outputs: dict[str, int] = {}
    ended: set[str] = set()
    for _ in range(5000):
        while todo:
            name, (hand_over, size, _) = str(todo[0][0]), todo[0][1]
            if not hand_over:
                s.submit(sequence(name, size))
            elif not s.waiting and pool.num_free > num_blocks_for(size, BLOCK):
                s.adopt(adopted(pool, name, size))
            else:
                break
            todo.pop(0)
        if not step(s) and not todo:
            break
        pool.check()
        for q in list(s.running):
            name = q.key.request_id
            outputs[name] = q.num_output_tokens
            if q.num_output_tokens >= arrivals[int(name)][2]:
                s.remove(q)
                ended.add(name)
    assert ended == {str(i) for i in range(len(arrivals))}
    assert pool.num_free == num_blocks
