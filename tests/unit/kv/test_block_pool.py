import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from distserve.errors import KVError, PoolExhausted
from distserve.kv.block_pool import BlockPool


def test_block_zero_is_never_allocated():
    pool = BlockPool(9)
    assert sorted(pool.allocate(8)) == list(range(1, 9))
    assert (pool.num_total, pool.num_free, pool.num_used) == (8, 0, 8)


def test_exhaustion_names_the_numbers_and_changes_nothing():
    pool = BlockPool(9)
    pool.allocate(5)
    with pytest.raises(PoolExhausted) as caught:
        pool.allocate(4)
    assert caught.value.fields == {"wanted": 4, "free": 3, "total": 8}
    assert pool.num_free == 3
    assert len(pool.allocate(3)) == 3


@pytest.mark.parametrize("ids", [[0], [9], [-1], [4]])
def test_foreign_and_unallocated_blocks_cannot_be_freed(ids: list[int]):
    pool = BlockPool(9)
    held = pool.allocate(3)
    with pytest.raises(KVError):
        pool.free([*held, *ids])
    assert pool.num_used == 3
    pool.check()


def test_a_double_free_is_refused_within_a_call_and_between_calls():
    pool = BlockPool(9)
    held = pool.allocate(3)
    with pytest.raises(KVError, match="freed twice"):
        pool.free([held[0], held[0]])
    pool.free(held)
    with pytest.raises(KVError, match="freed twice"):
        pool.free(held)
    pool.check()


def test_an_allocation_is_contiguous_where_a_run_is_long_enough():
    pool = BlockPool(101)
    a, b, c, d = (pool.allocate(n) for n in (10, 30, 5, 40))
    pool.free(a)
    pool.free(c)
    assert pool.allocate(5) == c  # the shortest that fits, not the first
    pool.free(b)
    assert pool.allocate(40) == list(range(1, 41))  # neighbours that came back have joined
    pool.free(d)
    pool.check()


def test_a_pool_without_a_usable_block_is_refused():
    with pytest.raises(KVError, match="at least 2"):
        BlockPool(1)


class PoolAgainstAModel(RuleBasedStateMachine):
    """A set of owned ids is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(40)
        self.held: list[list[int]] = []

    @rule(n=st.integers(0, 45))
    def allocate(self, n: int) -> None:
        owned = {i for ids in self.held for i in ids}
        if n > 39 - len(owned):
            with pytest.raises(PoolExhausted):
                self.pool.allocate(n)
            return
        ids = self.pool.allocate(n)
        assert len(set(ids)) == n
        assert not owned & set(ids)
        assert set(ids) <= set(range(1, 40))
        self.held.append(ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        part = data.draw(st.permutations(ids))
        cut = data.draw(st.integers(0, len(part)))
        self.pool.free(part[:cut])
        if part[cut:]:
            self.held.append(part[cut:])

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        assert self.pool.num_used == sum(map(len, self.held))


TestPoolAgainstAModel = PoolAgainstAModel.TestCase
TestPoolAgainstAModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 6), max_size=12))
def test_all_blocks_come_back(sizes: list[int]):
    pool = BlockPool(80)
    for ids in [pool.allocate(n) for n in sizes][::-1]:
        pool.free(ids)
    pool.check()
    assert pool.allocate(79) == list(range(1, 80))  # one run again
