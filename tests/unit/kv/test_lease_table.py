import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from distserve.errors import KVError, LeaseRevoked, StaleEpoch
from distserve.kv.lease import Lease, LeaseTable, first_epoch


def test_a_slot_is_used_again_under_a_higher_epoch():
    table = LeaseTable()
    first = table.grant("p", [1, 2], 10.0, 0.0)
    table.revoke(first.lease_id, first.epoch)
    second = table.grant("p", [1, 2], 10.0, 0.0)
    assert second.lease_id == first.lease_id
    assert second.epoch > first.epoch
    with pytest.raises(StaleEpoch) as caught:
        table.touch(first.lease_id, first.epoch, 1.0)
    assert caught.value.fields == {"lease_id": 1, "epoch": first.epoch, "current": second.epoch}
    assert table.revoke(first.lease_id, first.epoch) is None
    assert table.get(second.lease_id, second.epoch) is second


def test_a_lease_ends_once():
    table = LeaseTable()
    lease = table.grant("p", [3], 10.0, 0.0)
    assert table.commit(lease.lease_id, lease.epoch) is lease
    with pytest.raises(LeaseRevoked):
        table.commit(lease.lease_id, lease.epoch)
    assert table.revoke(lease.lease_id, lease.epoch) is None
    assert table.num_blocks == 0


def test_silence_is_counted_from_the_last_touch():
    table = LeaseTable()
    a, b = table.grant("p", [1], 5.0, 100.0), table.grant("q", [2], 2.0, 100.0)
    assert table.expired(101.9) == []
    assert table.expired(102.1) == [b]
    table.touch(b.lease_id, b.epoch, 104.0)
    table.touch(b.lease_id, b.epoch, 101.0)  # late news never moves it back
    assert table.expired(105.1) == [a]
    assert table.expired(106.1) == [a, b]
    assert len(table) == 2  # open until the owner has fenced and revoked them


def test_blocks_are_in_one_lease():
    table = LeaseTable()
    table.grant("p", [1, 2], 5.0, 0.0)
    with pytest.raises(KVError, match="block 2 is in another"):
        table.grant("q", [2, 3], 5.0, 0.0)
    with pytest.raises(KVError, match="twice"):
        table.grant("q", [4, 4], 5.0, 0.0)
    with pytest.raises(KVError, match="ttl_s is 0"):
        table.grant("q", [5], 0, 0.0)
    assert table.num_blocks == 2
    table.check()


def test_epochs_grow_over_restarts():
    before = LeaseTable(first_epoch()).grant("p", [], 1.0, 0.0)
    assert first_epoch() > before.epoch


class TableAgainstAModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.open: list[Lease] = []
        self.ended: list[Lease] = []
        self.names: set[tuple[int, int]] = set()
        self.next_block = 1

    @rule(n=st.integers(0, 4))
    def grant(self, n: int) -> None:
        lease = self.table.grant("p", list(range(self.next_block, self.next_block + n)), 1.0, 0.0)
        self.next_block += n
        assert (lease.lease_id, lease.epoch) not in self.names
        assert lease.lease_id not in {other.lease_id for other in self.open}
        self.names.add((lease.lease_id, lease.epoch))
        self.open.append(lease)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), commit=st.booleans())
    def end(self, data: st.DataObject, commit: bool) -> None:
        lease = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        end = self.table.commit if commit else self.table.revoke
        assert end(lease.lease_id, lease.epoch) is lease
        self.ended.append(lease)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def late(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.ended))
        assert self.table.revoke(lease.lease_id, lease.epoch) is None
        with pytest.raises((LeaseRevoked, StaleEpoch)):
            self.table.commit(lease.lease_id, lease.epoch)

    @invariant()
    def books_balance(self) -> None:
        self.table.check()
        assert len(self.table) == len(self.open)
        assert self.table.num_blocks == sum(len(lease.block_ids) for lease in self.open)


TestTableAgainstAModel = TableAgainstAModel.TestCase
TestTableAgainstAModel.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
