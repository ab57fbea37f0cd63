"""A pool that runs full: who loses its blocks, where they go, and that everybody ends all the same."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import Priority, Slo
from distserve.worker.prefixes import Prefixes
from distserve_decode.scheduler import Scheduler
from tests.unit.decode.test_scheduler import BLOCK, adopted, chained, misled, named_step, step
from tests.unit.worker.fakes import LAYOUT


def make(num_blocks: int, *, max_num_seqs: int = 8, chunk_tokens: int = 64) -> tuple[Scheduler, BlockPool, Prefixes]:
    pool = BlockPool(num_blocks + 1)
    prefixes = Prefixes(pool, LAYOUT, keep=True)
    scheduler = Scheduler(
        pool, prefixes, block_size=BLOCK, max_num_seqs=max_num_seqs, chunk_tokens=chunk_tokens, clock=lambda: 0.0
    )
    return misled(scheduler), pool, prefixes


@pytest.mark.parametrize(
    ("classes", "victim"), [("nnn", 2), ("nbn", 1), ("bnb", 2), ("vnv", 1), ("vvv", 2), ("bvn", 0)]
)
def test_the_last_of_the_lowest_class_goes(classes: str, victim: int) -> None:
    s, pool, _ = make(6)
    priorities: dict[str, Priority] = {"v": "vip", "n": "normal", "b": "batch"}
    some = [adopted(pool, str(i), 31) for i in range(3)]
    for each, letter in zip(some, classes, strict=True):
        s.adopt(each, Slo(priority=priorities[letter]))
    assert step(s) == {"0": 1, "1": 1, "2": 1}  # all tables are full now
    step(s)
    assert [q.num_preemptions for q in some] == [int(i == victim) for i in range(3)]


@dataclass
class Store:
    """Holds references to what it was given until a test says what has become of it."""

    pool: BlockPool
    held: list[list[int]] = field(default_factory=list)
    asked_now: list[int] = field(default_factory=list)
    brings: bool = True
    fetched_for: list[Sequence] = field(default_factory=list)

    def give(self, sequence: Sequence, num_now: int) -> None:
        self.asked_now.append(num_now)
        blocks = sequence.block_table[: max(0, min(sequence.num_named_blocks, len(sequence.block_table) - num_now))]
        if blocks:
            self.pool.acquire(blocks)
            self.held.append(blocks)

    def bring(self, sequence: Sequence) -> bool:
        if self.brings:
            self.fetched_for.append(sequence)
        return self.brings

    def let_go(self, at: int = 0) -> None:
        """Given, or failed: the pool is told nothing else."""
        self.pool.free(self.held.pop(at))


def until_preempted(sequence: Sequence, s: Scheduler, prefixes: Prefixes) -> None:
    for _ in range(200):
        if sequence.num_preemptions:
            return
        named_step(s, prefixes)
    pytest.fail(f"{sequence.key} was not preempted")


def test_what_is_needed_at_once_is_not_given_away_but_freed() -> None:
    s, pool, prefixes = make(16)
    store = s.elsewhere = Store(pool)
    old, young = chained(prefixes, "old", [1] * 31), chained(prefixes, "young", [2] * 12 * BLOCK)
    s.submit(old)
    s.submit(young)
    until_preempted(young, s, prefixes)
    assert store.asked_now == [1 + 2], "the block that is missing, and one for each that ran"
    assert [len(blocks) for blocks in store.held] == [10]
    assert s.num_preemptions == 1
    assert pool.num_available == 3 - 1
    store.let_go()
    assert pool.num_available == 16 - len(old.block_table)
    assert prefixes.num_held_tokens(young) == 12 * BLOCK, "until their place is needed they are here, too"


def test_one_whose_turn_has_come_again_is_fetched_for_and_then_goes_on() -> None:
    s, pool, prefixes = make(8)
    store = s.elsewhere = Store(pool)
    old, young = chained(prefixes, "old", [1] * 31), chained(prefixes, "young", [2] * 4 * BLOCK)
    s.submit(old)
    s.submit(young)
    until_preempted(young, s, prefixes)
    while store.held:
        store.let_go()
    named_step(s, prefixes)
    assert store.fetched_for == [], "there is no room for it yet"
    s.remove(old)
    assert named_step(s, prefixes) == {}
    assert store.fetched_for == [young]
    assert (s.num_waiting, s.waiting) == (1, [])
    assert named_step(s, prefixes) == {}, "it waits for its blocks"
    s.resume(young)
    assert "young" in named_step(s, prefixes)
    assert store.fetched_for == [young], "once"


def test_one_that_is_removed_while_it_is_fetched_for_is_gone() -> None:
    s, pool, prefixes = make(8)
    s.elsewhere = Store(pool)
    old, young = chained(prefixes, "old", [1] * 31), chained(prefixes, "young", [2] * 4 * BLOCK)
    s.submit(old)
    s.submit(young)
    until_preempted(young, s, prefixes)
    s.remove(old)
    named_step(s, prefixes)
    assert s.room.coming == [young]
    s.remove(young)
    s.resume(young)
    assert (s.num_waiting, s.running) == (0, [])
    assert named_step(s, prefixes) == {}


comers = st.lists(
    st.tuples(
        st.sampled_from(["vip", "normal", "batch"]),
        st.integers(1, 100),  # tokens of the prompt
        st.integers(1, 120),  # and of the output
        st.booleans(),  # by hand-over
    ),
    min_size=1,
    max_size=14,
)


@given(
    arrivals=comers,
    num_blocks=st.integers(14, 28),
    chunk=st.sampled_from([16, 64, 200]),
    seed=st.integers(0, 1 << 16),
    brings=st.booleans(),
)
def test_whatever_becomes_of_what_was_given_everybody_ends_and_every_block_comes_back(
    arrivals: list[tuple[Priority, int, int, bool]], num_blocks: int, chunk: int, seed: int, *, brings: bool
) -> None:
    """A store that takes its time, fails, or brings nothing back. While it holds no block, every pass takes somebody
    further."""
    rng = random.Random(seed)
    s, pool, prefixes = make(num_blocks, max_num_seqs=6, chunk_tokens=chunk)
    store = s.elsewhere = Store(pool, brings=brings)
    todo = list(enumerate(arrivals))
    here: dict[Sequence, int] = {}
    ended = num_steps = 0
    for _ in range(20_000):
        while todo and rng.random() < 0.5:
            i, (priority, num_tokens, num_out, by_hand_over) = todo[0]
            new = chained(prefixes, str(i), [1000 + i] * num_tokens, max_tokens=num_out)
            if not by_hand_over:
                s.submit(new, Slo(priority=priority))
            elif pool.num_available > num_tokens // BLOCK + 1 and s.room.num_seats > 0:
                new = adopted(pool, str(i), num_tokens)
                s.adopt(new, Slo(priority=priority))
            else:
                break
            todo.pop(0)
            here[new] = num_out + new.num_output_tokens
        num_seen = len(s.running) + s.num_waiting
        assert num_seen == len(here), "nobody is lost, nobody is here twice"
        held = bool(store.held)
        done = named_step(s, prefixes)
        num_steps += len(done)
        assert done or held or s.room.coming or not here
        pool.check()
        used = {block for q in s.running for block in q.block_table} | {b for blocks in store.held for b in blocks}
        assert pool.num_used == len(used)
        for q in [q for q in here if q.num_output_tokens >= here[q]]:
            s.remove(q)
            del here[q]
            ended += 1
        while store.held and rng.random() < 0.3:
            store.let_go(rng.randrange(len(store.held)))
        while store.fetched_for and rng.random() < 0.5:
            s.resume(store.fetched_for.pop(0))
        if not (todo or here):
            break
    assert ended == len(arrivals)
    while store.held:
        store.let_go()
    assert pool.num_used == 0
    assert s.num_preemptions <= num_steps, "no more is thrown out than goes on"
