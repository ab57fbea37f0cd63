"""Commits and losses of leases, told to whose leases they are."""

import asyncio
import logging

import pytest

from distserve.errors import LeaseRevoked, MalformedMessage, PeerLost, TransportError
from distserve.kv.lease import LeaseTable
from distserve.messages import FetchedState, OfferedState, encode
from distserve.transport.base import Commit
from distserve.worker.store.arrivals import Arrivals

FETCHED = encode(FetchedState(source="node", num_blocks=1))


def commit_of(lease, state: bytes = FETCHED) -> Commit:
    return Commit(lease.lease_id, lease.epoch, state, 100)


async def test_what_is_expected_arrives_and_all_else_goes_to_the_others():
    commits, losses = [], []
    leases, arrivals = LeaseTable(), Arrivals(commits.append, lambda *lost: losses.append(lost))
    ours, theirs = leases.grant("node", [1], 1.0, 0.0), leases.grant("prefill", [2], 1.0, 0.0)
    arrival = arrivals.expect(ours)
    arrivals.on_commit(commit_of(theirs, b"a sequence's state"))
    arrivals.on_commit(commit_of(ours))
    assert await arrival == 100
    assert [c.lease_id for c in commits] == [theirs.lease_id]
    error = PeerLost("gone")
    arrivals.on_lost(theirs.lease_id, theirs.epoch, error)
    assert losses == [(theirs.lease_id, theirs.epoch, error)]


async def test_a_slot_that_is_used_again_is_another_lease():
    commits = []
    leases, arrivals = LeaseTable(), Arrivals(commits.append)
    first = leases.grant("node", [1], 1.0, 0.0)
    arrivals.expect(first)
    arrivals.forget(first)
    leases.revoke(first.lease_id, first.epoch)
    second = leases.grant("prefill", [1], 1.0, 0.0)
    assert second.lease_id == first.lease_id
    arrivals.expect(first)
    arrivals.on_commit(commit_of(second, b"a sequence's state"))
    assert len(commits) == 1


async def test_a_loss_is_raised_where_it_is_waited_for():
    leases, arrivals = LeaseTable(), Arrivals()
    for error, kind in ((PeerLost("gone"), PeerLost), (OSError("broken"), TransportError)):
        lease = leases.grant("node", [len(leases) + 1], 1.0, 0.0)
        arrival = arrivals.expect(lease)
        arrivals.on_lost(lease.lease_id, lease.epoch, error)
        with pytest.raises(kind):
            await arrival


async def test_without_others_an_unknown_commit_is_refused():
    leases, arrivals = LeaseTable(), Arrivals()
    lease = leases.grant("node", [1], 1.0, 0.0)
    with pytest.raises(LeaseRevoked):
        arrivals.on_commit(commit_of(lease))
    arrivals.on_lost(lease.lease_id, lease.epoch, PeerLost("gone"))  # nobody's: nothing


async def test_the_state_of_something_else_is_refused():
    leases, arrivals = LeaseTable(), Arrivals()
    lease = leases.grant("node", [1], 1.0, 0.0)
    arrival = arrivals.expect(lease)
    with pytest.raises(MalformedMessage):
        arrivals.on_commit(commit_of(lease, encode(OfferedState(worker="w"))))
    assert not arrival.done()
    arrivals.on_lost(lease.lease_id, lease.epoch, MalformedMessage("as the receiver tells it"))
    with pytest.raises(MalformedMessage):
        await arrival


async def test_a_loss_that_nobody_waits_for_is_no_complaint(caplog: pytest.LogCaptureFixture):
    leases, arrivals = LeaseTable(), Arrivals()
    lease = leases.grant("node", [1], 1.0, 0.0)
    arrival = arrivals.expect(lease)
    arrivals.on_lost(lease.lease_id, lease.epoch, PeerLost("gone"))
    arrivals.forget(lease)
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(0)
        del arrival
        await asyncio.sleep(0)
    assert not caplog.records
