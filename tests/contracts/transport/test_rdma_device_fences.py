"""Fences over copies: what ends while a device copies its blocks waits for that copy. On pools that are staged, and on
network cards of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from distserve.errors import LeaseRevoked, TransportError
from tests.contracts.transport.conftest import HAS_DEVICE, Rig, commits_fine, everything
from tests.contracts.transport.device_rig import FILL, all_is_back, devices_of, landing_of, opened, started, stays
from tests.waiting import until

pytestmark = pytest.mark.skipif(HAS_DEVICE, reason="for devices that this process makes up")


@pytest.fixture
async def rig(stack: AsyncExitStack) -> AsyncIterator[Rig]:
    rig = await Rig("rdma-staged", stack).start()
    yield rig
    await all_is_back(rig)


async def test_a_lease_revoked_while_it_is_copied_out_keeps_the_source_until_the_copy_is_over(rig: Rig) -> None:
    source, target = devices_of(rig)
    transfer = await rig.open(rig.grant([1, 2, 3, 4]))
    await opened(rig, transfer)
    source.fetching.hold()
    transfer.write(everything([5, 6, 7, 8]))
    await until(lambda: source.fetching.num_waiting == 1, what="a copy under way")
    await rig.receiver.revoke(1)  # the receiver does not wait for the sender's device
    rig.target.blocks[1:5] = FILL
    await until(lambda: transfer.failure is not None, what="the writer's knowing")
    commit = asyncio.create_task(transfer.commit(b"", timeout_s=10))
    await stays(commit)
    source.fetching.release()
    with pytest.raises(LeaseRevoked):
        await commit
    num_fetched = len(source.fetched)
    await commits_fine(rig, rig.grant([9], lease_id=2), [9], [9])
    assert {span.source_blocks for span in source.fetched[num_fetched:]} == {(9,)}  # what was queued was skipped
    assert (rig.target.blocks[1:5] == FILL).all()
    assert target.stored == [(9,)]


async def test_a_commit_that_times_out_while_it_is_copied_out_waits_for_the_copy(rig: Rig) -> None:
    source, _ = devices_of(rig)
    transfer = await rig.open(rig.grant([1]))
    await opened(rig, transfer)
    source.fetching.hold()
    transfer.write(everything([5]))
    await until(lambda: source.fetching.num_waiting == 1, what="a copy under way")
    commit = asyncio.create_task(transfer.commit(b"", timeout_s=0.01))
    await rig.lost(1)
    await stays(commit)
    source.fetching.release()
    with pytest.raises(TransportError, match="not acknowledged within"):
        await commit


async def test_a_lease_revoked_while_it_is_stored_is_fenced_by_the_end_of_the_copy(rig: Rig) -> None:
    _, target = devices_of(rig)
    transfer = await rig.open(rig.grant([1, 2, 3, 4]))
    target.storing.hold()
    transfer.write(everything([5, 6, 7, 8]))
    commit = asyncio.create_task(transfer.commit(b"", timeout_s=10))
    await until(lambda: target.storing.num_waiting == 1, what="the copy into the pool")
    revoke = asyncio.create_task(rig.receiver.revoke(1))
    await stays(revoke)
    target.storing.release()
    async with asyncio.timeout(10):
        await revoke
    rig.target.blocks[1:5] = FILL
    with pytest.raises(LeaseRevoked):
        await commit
    assert (rig.target.blocks[1:5] == FILL).all()
    assert not rig.commits
    assert not rig.losses  # the owner knows what it revoked
    await commits_fine(rig, rig.grant([1, 2, 3, 4], lease_id=1, epoch=2), [5, 6, 7, 8], [1, 2, 3, 4])


async def test_a_device_that_is_too_slow_fails_the_lease_and_the_owner_hears_once_it_is_fenced(
    stack: AsyncExitStack,
) -> None:
    rig = await started(stack, "rdma-staged", store_timeout_s=0.05)
    _, target = devices_of(rig)
    transfer = await rig.open(rig.grant([1, 2]))
    target.storing.hold()
    transfer.write(everything([5, 6]))
    with pytest.raises(TransportError, match=r"did not take 2 blocks within 0.05 s"):
        await transfer.commit(b"", timeout_s=10)
    for _ in range(20):
        await asyncio.sleep(0.002)
    assert not rig.losses
    assert rig.receiver.idle_s(1) is not None
    target.storing.release()
    assert "did not take 2 blocks" in str(await rig.lost(1))
    rig.target.blocks[1:3] = FILL
    await commits_fine(rig, rig.grant([9]), [9], [9])
    assert (rig.target.blocks[1:3] == FILL).all()
    await all_is_back(rig)


async def test_a_receiver_that_stops_waits_for_the_copy_into_the_pool(rig: Rig) -> None:
    _, target = devices_of(rig)
    transfer = await rig.open(rig.grant([1]))
    target.storing.hold()
    transfer.write(everything([5]))
    commit = asyncio.create_task(transfer.commit(b"", timeout_s=10))
    await until(lambda: target.storing.num_waiting == 1, what="the copy into the pool")
    landing = landing_of(rig)
    stop = asyncio.create_task(rig.receiver.stop())
    await until(lambda: rig.receiver.idle_s(1) is None, what="the beginning of the end")
    await stays(stop)
    target.storing.release()
    async with asyncio.timeout(10):
        await stop
    assert landing.memory.fd is None
    rig.target.blocks[1] = FILL
    with pytest.raises(TransportError):
        await commit
    assert (rig.target.blocks[1] == FILL).all()
    assert not rig.commits
