"""Leases and bytes that go bad: each is known soon, by name, and fails alone. On every transport. Peers and connections
are in test_transport_peers.py."""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
import pytest

from distserve.errors import (
    Cancelled,
    ChecksumMismatch,
    KVError,
    LayoutMismatch,
    LeaseRevoked,
    StaleEpoch,
    TransportError,
)
from distserve.transport.base import Lease, PoolMemory, Span
from tests.contracts.transport.conftest import SLOW, Rig, commits_fine, everything
from tests.contracts.transport.pools import SMALL
from tests.waiting import until

FILL = 0xA5


# ---------------------------------------------------------------- leases


async def test_a_wrong_epoch_is_refused_with_both_named(rig: Rig) -> None:
    old = rig.grant([1, 2], lease_id=5, epoch=3)
    await rig.receiver.revoke(5)
    new = rig.grant([1, 2], lease_id=5, epoch=4)
    late = await rig.open(old)
    late.write(everything([9, 9]))
    with pytest.raises(StaleEpoch) as caught:
        await late.commit(b"", timeout_s=5)
    assert caught.value.fields == {"lease_id": 5, "epoch": 3, "current": 4}
    assert not rig.target.blocks.any()
    assert not rig.losses
    await rig.receiver.revoke(5, 3)  # of a lease that is over: does not touch its successor
    await commits_fine(rig, new, [3, 4], [1, 2])


async def test_a_lease_that_was_never_granted_is_refused(rig: Rig) -> None:
    region = msgspec.structs.replace(rig.grant([1]), lease_id=77)
    transfer = await rig.open(region)
    with pytest.raises(LeaseRevoked, match="lease 77"):
        await transfer.commit(b"", timeout_s=5)


async def test_a_lease_is_written_by_one_connection_only(rig: Rig) -> None:
    region = rig.grant([1])
    first = await rig.open(region)
    first.write([Span(0, 1, (1,), (0,))])
    await until(lambda: rig.has_come(1, 0), what="the first write")
    second = await rig.add_sender(rig.add_pool(seed=3), "prefill-1").open(region, timeout_s=5)
    second.write(everything([2]))
    with pytest.raises(TransportError, match="another connection"):
        await second.commit(b"", timeout_s=5)
    first.write([Span(1, 4, (1,), (0,))])
    await first.commit(b"", timeout_s=5)
    rig.assert_arrived([1], [1])


async def test_revoking_one_lease_stops_its_writer_and_lets_the_others_commit(rig: Rig) -> None:
    doomed, fine = await rig.open(rig.grant([1, 2, 3])), await rig.open(rig.grant([4, 5, 6]))
    for transfer in (doomed, fine):
        transfer.write([Span(0, 1, (7, 8, 9), (0, 1, 2))])
    await until(lambda: rig.has_come(3, 0), what="the first layer")
    await rig.receiver.revoke(1)
    await until(lambda: doomed.failure is not None, what="the writer's knowing")  # unasked: before any commit
    for transfer in (doomed, fine):
        transfer.write([Span(1, 4, (7, 8, 9), (0, 1, 2))])
    with pytest.raises(LeaseRevoked, match="lease 1 was revoked"):
        await doomed.commit(b"", timeout_s=5)
    await fine.commit(b"", timeout_s=5)
    rig.assert_arrived([7, 8, 9], [4, 5, 6])
    assert not rig.target.blocks[1:4, 1:].any()
    assert not rig.losses  # the owner knows what it revoked


async def test_a_late_writer_cannot_change_bytes_after_revoke(rig: Rig) -> None:
    proxy = rig.add_proxy()
    late = await rig.open(proxy.redirect(rig.grant(list(range(1, 41)))))
    late.write([Span(0, 2, tuple(range(1, 41)), tuple(range(40)))])
    await until(lambda: rig.has_come(40, 1), what="the first half")
    proxy.hold()
    late.write([Span(2, 4, tuple(range(1, 41)), tuple(range(40)))])
    commit = asyncio.create_task(late.commit(b"late", timeout_s=5))
    await rig.receiver.revoke(1)
    rig.target.blocks[1:41] = FILL  # they are somebody else's now
    proxy.release()
    with pytest.raises(LeaseRevoked):
        await commit
    assert (rig.target.blocks[1:41] == FILL).all()
    await commits_fine(rig, proxy.redirect(rig.grant(list(range(1, 41)))), list(range(1, 41)), list(range(1, 41)))


async def test_revoke_in_mid_stream_is_a_fence_every_time(rig: Rig) -> None:
    sources, targets = tuple(range(1, 61)), tuple(range(60))
    for attempt in range(30 if SLOW == 1 else 10):
        writer = await rig.open(rig.grant(list(range(1, 61)), lease_id=1, epoch=attempt + 1))
        rig.wipe()
        for _ in range(200):
            writer.write([Span(0, 4, sources, targets)])
        await until(lambda: any(rig.has_come(i, 0) for i in range(1, 61)), what="the stream")
        await rig.receiver.revoke(1)
        rig.target.blocks[:] = FILL
        # A writer that sees to its own work, as rdma's does, may find first that it has written each block many times.
        with pytest.raises(TransportError if rig.kind == "rdma" else LeaseRevoked):
            await writer.commit(b"", timeout_s=10)  # returns once all that was on its way has gone by
        assert (rig.target.blocks == FILL).all(), f"a late write in attempt {attempt}"
    await rig.receiver.revoke(1)
    await rig.receiver.revoke(12345)


async def test_idle_s_counts_from_the_grant_and_from_the_last_byte(rig: Rig) -> None:
    region = rig.grant([1])
    assert rig.receiver.idle_s(99) is None
    await until(lambda: (rig.receiver.idle_s(1) or 0) > 0.2, what="silence")
    transfer = await rig.open(region)
    transfer.write([Span(0, 1, (1,), (0,))])
    await until(lambda: (rig.receiver.idle_s(1) or 9) < 0.2, what="a sign of life")
    await until(lambda: (rig.receiver.idle_s(1) or 0) > 0.2, what="silence again")  # so the owner lets it expire
    await rig.receiver.revoke(1)
    assert rig.receiver.idle_s(1) is None
    with pytest.raises(LeaseRevoked):
        await transfer.commit(b"", timeout_s=5)


async def test_grants_of_foreign_or_doubled_blocks_are_refused(rig: Rig) -> None:
    for block_ids in ([0], [64], [-1], [3, 3]):
        with pytest.raises(KVError):
            rig.grant(block_ids, lease_id=50)
    rig.grant([3], lease_id=50)
    with pytest.raises(KVError, match="open already"):
        rig.grant([4], lease_id=50)


# ---------------------------------------------------------------- giving up


async def test_abort_tells_the_owner_and_is_idempotent(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1, 2]))
    transfer.write([Span(0, 1, (1, 2), (0, 1))])
    await asyncio.gather(transfer.abort("client gone"), transfer.abort("client gone"))
    await transfer.abort("again")
    error = await rig.lost(1)
    assert isinstance(error, Cancelled)
    assert error.fields["reason"] == "client gone"
    assert len(rig.losses) == 1
    transfer.write([Span(1, 2, (1, 2), (0, 1))])  # ignored
    with pytest.raises(LeaseRevoked, match="client gone"):
        await transfer.commit(b"", timeout_s=5)
    await commits_fine(rig, rig.grant([1, 2]), [5, 6], [1, 2])


async def test_abort_overtakes_what_is_queued(rig: Rig) -> None:
    proxy = rig.add_proxy()
    big, other = await rig.open(proxy.redirect(rig.grant([1]))), await rig.open(proxy.redirect(rig.grant([2])))
    for _ in range(500):
        big.write(everything([1]))
    await big.abort("changed its mind")
    assert isinstance(await rig.lost(1), Cancelled)
    other.write(everything([3]))
    await other.commit(b"", timeout_s=5)
    rig.assert_arrived([3], [2])


async def test_a_cancelled_commit_gives_the_lease_up(rig: Rig) -> None:
    proxy = rig.add_proxy()
    transfer = await rig.open(proxy.redirect(rig.grant([1])))
    transfer.write(everything([1]))
    await until(lambda: rig.has_come(1, 3), what="the write")
    proxy.hold()
    task = asyncio.create_task(transfer.commit(b"", timeout_s=30))
    await asyncio.sleep(0)
    task.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 5 * SLOW  # the receiver hears nothing: bounded by abort_timeout_s, then cut
    proxy.release()
    # Adopted if the COMMIT had left before the cancel, lost if not; one of them, and the owner knows which.
    await until(lambda: bool(rig.commits or rig.losses), what="the owner's knowing")
    assert len(rig.commits) + len(rig.losses) == 1
    assert rig.receiver.idle_s(1) is None


# ---------------------------------------------------------------- layouts and bytes


async def test_another_layout_in_the_region_is_refused_by_field(rig: Rig) -> None:
    region = rig.grant([1])
    other = msgspec.structs.replace(region, layout=msgspec.structs.replace(SMALL, rope='{"theta": 1e6}'))
    with pytest.raises(LayoutMismatch) as caught:
        await rig.open(other)
    assert caught.value.fields["field"] == "rope"


async def test_a_receiver_of_another_layout_refuses_by_field(rig: Rig) -> None:
    theirs = msgspec.structs.replace(SMALL, weights="another model")
    receiver = await rig.add_receiver(rig.add_pool(layout=theirs))
    granted = receiver.grant(Lease(1, 1, [1], 5.0))
    region = msgspec.structs.replace(granted, layout=SMALL)  # it lies, or was replaced since
    for _ in range(2):
        with pytest.raises(LayoutMismatch) as caught:
            await rig.open(region)
        assert caught.value.fields == {"field": "weights", "ours": "test", "theirs": "another model"}


async def test_a_damaged_byte_is_found_and_named(rig: Rig) -> None:
    region, sender = rig.grant([1, 2, 3]), rig.sender
    if rig.kind == "rdma":  # in the receiver's memory, before it looks
        transfer = await rig.open(region)
        transfer.write(everything([7, 8, 9]))
        await until(lambda: rig.has_come(3, 3), what="the writes")
        rig.arriving(3)[2, 100] ^= 0x10
        with pytest.raises(ChecksumMismatch) as caught:
            await transfer.commit(b"", timeout_s=5)
        assert caught.value.fields == {"lease_id": 1, "block_index": 2}
        assert isinstance(await rig.lost(1), ChecksumMismatch)
        await commits_fine(rig, rig.grant([1, 2, 3]), [7, 8, 9], [1, 2, 3])
        return
    if rig.kind == "tcp":  # on its way
        proxy = rig.add_proxy()
        region = proxy.redirect(region)
        proxy.flip_at = 20_000  # past HELLO and OPEN: 24 KiB of blocks follow, so in the third
    else:  # the receiver reads other bytes than the sender sums
        seen = rig.source.blocks.copy()
        seen[9, 2, 100] ^= 0x10
        sender = rig.add_sender(PoolMemory(SMALL, seen, rig.source.fd), "prefill-1")
    transfer = await sender.open(region, timeout_s=5)
    transfer.write(everything([7, 8, 9]))
    with pytest.raises(ChecksumMismatch) as caught:
        await transfer.commit(b"", timeout_s=5)
    assert caught.value.fields == {"lease_id": 1, "block_index": 2}
    assert isinstance(await rig.lost(1), ChecksumMismatch)
    assert not rig.commits
    await commits_fine(rig, rig.grant([1, 2, 3]), [7, 8, 9], [1, 2, 3])


async def test_a_source_block_reused_before_it_was_read_cannot_be_committed(rig: Rig) -> None:
    """The promise broken on purpose: the sender's owner overwrites blocks that it had queued."""
    proxy = rig.add_proxy()
    transfer = await rig.open(proxy.redirect(rig.grant([1, 2])))
    await until(lambda: proxy.forwarded > 0, what="the connection")
    if rig.kind == "rdma":
        await until(lambda: transfer.opened is not None, what="the keys")
    proxy.hold()
    transfer.write(everything([5, 6]))
    commit = asyncio.create_task(transfer.commit(b"", timeout_s=5))
    before = rig.source.blocks[[5, 6]].copy()
    await until(lambda: bool(transfer.sums.all()), what="the sender's sums")
    rig.source.blocks[5:7] = FILL
    proxy.release()
    if not rig.copies_first:
        with pytest.raises(ChecksumMismatch):
            await commit
        assert not rig.commits
    else:  # the bytes had left before
        await commit
        assert np.array_equal(rig.target.blocks[[1, 2]], before)
