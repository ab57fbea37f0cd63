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


def name(i: int) -> bytes:
    return i.to_bytes(32, "little")


def names(*numbers: int) -> list[bytes]:
    return [name(i) for i in numbers]


def test_a_named_block_that_nobody_uses_is_kept_and_found():
    pool = BlockPool(9)
    ids = pool.allocate(3)
    pool.name(ids[:2], names(1, 2))
    pool.free(ids)
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_available) == (6, 2, 0, 8)
    assert pool.find(names(1, 2, 3)) == ids[:2]
    pool.check()


def test_a_search_ends_at_the_first_name_that_is_not_here():
    pool = BlockPool(9)
    ids = pool.allocate(3)
    pool.name(ids, names(1, 2, 3))
    assert pool.find(names(1, 7, 3)) == ids[:1]
    assert pool.find(names(7, 2)) == []


def test_a_block_has_as_many_owners_as_acquired_it():
    pool = BlockPool(9)
    ids = pool.allocate(2)
    pool.name(ids, names(1, 2))
    pool.acquire(ids)
    pool.free(ids)
    assert pool.num_used == 2
    pool.free(ids)
    assert (pool.num_used, pool.num_cached) == (0, 2)
    pool.acquire(ids)  # out of the cache again
    assert (pool.num_used, pool.num_cached) == (2, 0)
    pool.check()


def test_a_free_block_cannot_be_acquired_and_then_none_of_them_is():
    pool = BlockPool(9)
    ids = pool.allocate(1)
    for wrong in (8, 0, 9, -1):
        with pytest.raises(KVError, match="can't be acquired"):
            pool.acquire([*ids, wrong])
    pool.free(ids)
    assert pool.num_used == 0


def test_the_longest_unused_goes_first_and_of_one_sequence_its_end():
    pool = BlockPool(7)
    removed: list[bytes] = []
    pool.on_removed = removed.extend
    first, second = pool.allocate(3), pool.allocate(3)
    pool.name(first, names(1, 2, 3))
    pool.name(second, names(4, 5, 6))
    pool.free(first)
    pool.free(second)
    pool.allocate(2)
    assert removed == names(3, 2)
    hit = pool.find(names(1))
    pool.acquire(hit)
    pool.free(hit)  # used: now the last to go
    pool.allocate(3)
    assert removed == names(3, 2, 6, 5, 4)
    assert pool.find(names(1)) == hit
    pool.check()


def test_a_beginning_outlives_its_end_whoever_left_it_here():
    pool = BlockPool(9)
    beginning = pool.allocate(3)
    pool.name(beginning, names(1, 2, 3))
    pool.free(beginning)
    end = pool.allocate(2)
    pool.name(end, names(4, 5), parent=names(3)[0])
    pool.free(end)  # later than the beginning, and served alone
    pool.allocate(3 + 2)
    assert pool.find(names(1, 2, 3, 4, 5)) == beginning


def test_what_was_wrong_is_found_no_more_and_is_free_when_nobody_uses_it():
    pool = BlockPool(9)
    gone: list[bytes] = []
    pool.on_removed = gone.extend
    used, unused = pool.allocate(2), pool.allocate(2)
    pool.name(used, names(1, 2))
    pool.name(unused, names(3, 4))
    pool.free(unused)
    pool.forget([*used, *unused])
    assert sorted(gone) == names(1, 2, 3, 4)
    assert pool.find(names(1)) == pool.find(names(3)) == []
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 0, 6)
    pool.free(used)
    assert (pool.num_cached, pool.num_free) == (0, 8)
    pool.check()


def test_an_allocation_from_scattered_blocks_takes_the_longest_runs_first():
    pool = BlockPool(20)
    ids = pool.allocate(19)
    pool.free([1, 3, 4, 6, 7, 8, 10, 12])
    assert pool.allocate(4) == [6, 7, 8, 1]
    assert pool.allocate(3) == [3, 4, 10]
    assert pool.num_free == 1
    pool.check()
    assert len(ids) == 19


def test_acquired_blocks_are_never_evicted():
    pool = BlockPool(5)
    ids = pool.allocate(4)
    pool.name(ids, names(1, 2, 3, 4))
    pool.free(ids)
    pool.acquire(ids[:3])
    with pytest.raises(PoolExhausted) as caught:
        pool.allocate(2)
    assert caught.value.fields == {"wanted": 2, "free": 1, "total": 4}
    assert pool.allocate(1) == ids[3:]
    assert pool.find(names(1, 2, 3)) == ids[:3]


def test_free_blocks_are_taken_before_anything_is_evicted():
    pool = BlockPool(9)
    ids = pool.allocate(2)
    pool.name(ids, names(1, 2))
    pool.free(ids)
    assert not set(pool.allocate(6)) & set(ids)
    assert pool.find(names(1, 2)) == ids


def test_of_two_blocks_with_one_content_the_first_has_the_name():
    pool = BlockPool(9)
    stored: list[bytes] = []
    pool.on_stored = stored.extend
    first, second = pool.allocate(1), pool.allocate(1)
    pool.name(first, names(1))
    pool.name(second, names(1))
    assert stored == names(1)
    assert pool.find(names(1)) == first
    pool.free(second)
    assert (pool.num_cached, pool.num_free) == (0, 7)  # the double is of no use
    pool.free(first)
    assert pool.find(names(1)) == first
    pool.check()


def test_what_cannot_be_named_is_refused_and_then_nothing_is():
    pool = BlockPool(9)
    stored: list[bytes] = []
    pool.on_stored = stored.extend
    ids = pool.allocate(3)
    pool.name(ids[:1], names(1))
    for blocks, wanted, why in (
        ([ids[1], 8], names(2, 3), "nobody uses it"),
        ([ids[1], 0], names(2, 3), "nobody uses it"),
        ([ids[1], ids[0]], names(2, 3), "another name"),
        ([ids[1], ids[1]], names(2, 3), "two names"),
    ):
        with pytest.raises(KVError, match=why):
            pool.name(blocks, wanted)
        assert stored == names(1)
        assert pool.names == names(1)
        pool.check()
    pool.name(ids[:1], names(1))  # alike: no change
    assert stored == names(1)


def test_events_tell_what_can_be_found():
    pool = BlockPool(5)
    here: set[bytes] = set()
    pool.on_stored, pool.on_removed = here.update, here.difference_update
    for i in range(5):
        ids = pool.allocate(3)
        pool.name(ids[:2], names(2 * i, 2 * i + 1))
        assert here == set(pool.names)
        pool.free(ids)
    assert pool.drop_cached() == 3
    assert here == set() == set(pool.names)
    assert (pool.num_free, pool.num_cached) == (4, 0)


def test_a_pool_that_keeps_nothing_names_nothing():
    pool = BlockPool(5, keep=False)
    ids = pool.allocate(2)
    pool.name(ids, names(1, 2))
    assert pool.find(names(1)) == []
    pool.free(ids)
    assert (pool.num_cached, pool.num_free) == (0, 4)


class PoolAgainstAModel(RuleBasedStateMachine):
    """A list of holdings and, of what is named, who had it last, is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(40)
        self.held: list[list[int]] = []  # a block is in as many of them as it has references
        self.named: dict[int, bytes] = {}
        self.parents: dict[bytes, bytes] = {}  # of what is named
        self.unused: list[int] = []  # named, in nobody's hands: the next to go first
        self.here: set[bytes] = set()
        self.pool.on_stored, self.pool.on_removed = self.here.update, self.here.difference_update

    def owned(self) -> set[int]:
        return {i for ids in self.held for i in ids}

    @rule(n=st.integers(0, 45))
    def allocate(self, n: int) -> None:
        owned, num_free = self.owned(), 39 - len(self.owned()) - len(self.unused)
        if n > num_free + len(self.unused):
            with pytest.raises(PoolExhausted):
                self.pool.allocate(n)
            return
        ids = self.pool.allocate(n)
        assert len(set(ids)) == n
        assert not owned & set(ids)
        assert set(ids) <= set(range(1, 40))
        evicted, self.unused = self.unused[: max(0, n - num_free)], self.unused[max(0, n - num_free) :]
        for block_id in evicted:
            self.unname(block_id)
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
        owned = self.owned()
        self.unused += [i for i in part[:cut][::-1] if i in self.named and i not in owned]
        if cut:
            by_name = {n: i for i, n in self.named.items()}
            name = self.named.get(part[0], b"")
            for _ in range(len(self.parents)):
                name = self.parents.get(name, b"")
                if name not in by_name:
                    break
                if by_name[name] in self.unused:
                    self.unused.remove(by_name[name])
                    self.unused.append(by_name[name])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), numbers=st.lists(st.integers(0, 30), max_size=5, unique=True))
    def give_names(self, data: st.DataObject, numbers: list[int]) -> None:
        ids = data.draw(st.sampled_from(self.held))[: len(numbers)]
        wanted = names(*numbers)[: len(ids)]
        if any(self.named.get(i, n) != n for i, n in zip(ids, wanted, strict=True)):
            with pytest.raises(KVError, match="another name"):
                self.pool.name(ids, wanted)
            return
        taken = set(self.named.values())
        parent = data.draw(st.sampled_from([b"", *names(1, 2)]))
        self.pool.name(ids, wanted, parent)
        before = dict(zip(wanted, [parent, *wanted], strict=False))
        self.parents.update((n, before[n]) for n in wanted if n not in taken)
        self.named.update((i, n) for i, n in zip(ids, wanted, strict=True) if n not in taken)

    @rule(numbers=st.lists(st.integers(0, 30), max_size=4, unique=True))
    def find_and_acquire(self, numbers: list[int]) -> None:
        by_name = {n: i for i, n in self.named.items()}
        expected = []
        for n in names(*numbers):
            if n not in by_name:
                break
            expected.append(by_name[n])
        ids = self.pool.find(names(*numbers))
        assert ids == expected
        if ids:
            self.pool.acquire(ids)
            self.held.append(ids)
            self.unused = [i for i in self.unused if i not in ids]

    @rule()
    def drop_what_is_cached(self) -> None:
        assert self.pool.drop_cached() == len(self.unused)
        for block_id in self.unused:
            self.unname(block_id)
        self.unused = []

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(1, 39), unique=True, max_size=6))
        self.pool.forget(ids)
        for block_id in set(ids) & self.named.keys():
            self.unname(block_id)
        self.unused = [i for i in self.unused if i not in ids]

    def unname(self, block_id: int) -> None:
        self.parents.pop(self.named.pop(block_id), None)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        assert self.pool.num_used == len(self.owned())
        assert self.pool.num_cached == len(self.unused)
        assert self.pool.num_available == 39 - len(self.owned())
        assert set(self.pool.names) == set(self.named.values()) == self.here


TestPoolAgainstAModel = PoolAgainstAModel.TestCase
TestPoolAgainstAModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 6), max_size=12))
def test_all_blocks_come_back(sizes: list[int]):
    pool = BlockPool(80)
    for ids in [pool.allocate(n) for n in sizes][::-1]:
        pool.free(ids)
    pool.check()
    assert pool.allocate(79) == list(range(1, 80))  # one run again
