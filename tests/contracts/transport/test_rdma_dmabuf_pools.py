"""Pools in a device's memory that the network card reaches as a dma-buf. On cards of this process."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from distserve.errors import TransportError
from distserve.transport.base import Span, Transfer
from distserve.transport.rdma.receiver import RdmaReceiver
from tests.contracts.transport.conftest import HAS_DEVICE, Rig, everything
from tests.contracts.transport.device_rig import BLOCK, FILL, devices_of, opened, started
from tests.waiting import until

pytestmark = pytest.mark.skipif(HAS_DEVICE, reason="for devices that this process makes up")


async def test_addresses_for_a_peer_start_at_the_pools_offset_in_its_dmabuf(stack: AsyncExitStack) -> None:
    rig = await started(stack, "rdma-dmabuf")
    transfer = await rig.open(rig.grant([3, 4, 9]))
    await opened(rig, transfer)
    runs = [run for lane in transfer.opened.runs.values() for run in lane]  # type: ignore[attr-defined]
    assert {(run.first, run.count, run.address) for run in runs} == {
        (0, 2, rig.offset + 3 * BLOCK),
        (2, 1, rig.offset + 9 * BLOCK),
    }
    assert isinstance(rig.receiver, RdmaReceiver)
    nic = rig.receiver._devices.nics[0]
    assert nic.counts()["windows"] == 0  # none can be bound on a dma-buf
    await commits_of(rig, transfer, [5, 6, 7], [3, 4, 9])


async def commits_of(rig: Rig, transfer: Transfer, sources: list[int], block_ids: list[int]) -> None:
    transfer.write(everything(sources))
    await transfer.commit(b"", timeout_s=10)
    rig.assert_arrived(sources, block_ids)


async def test_nothing_is_sent_from_a_dmabuf_before_the_device_is_done_with_it(stack: AsyncExitStack) -> None:
    rig = await started(stack, "rdma-dmabuf")
    source, _ = devices_of(rig)
    transfer = await rig.open(rig.grant([1]))
    await opened(rig, transfer)
    source.fetching.hold()
    posted = rig.wire.forwarded
    transfer.write(everything([5]))
    await until(lambda: source.fetching.num_waiting == 1, what="the wait for the device")
    rig.source.blocks[5] = FILL  # the device computes it only now
    assert rig.wire.forwarded - posted < BLOCK
    source.fetching.release()
    await transfer.commit(b"", timeout_s=10)
    assert (rig.target.blocks[1] == FILL).all()


async def test_a_silent_writer_into_a_dmabuf_loses_its_pairs_and_the_other_leases_go_on(stack: AsyncExitStack) -> None:
    rig = await started(stack, "rdma-dmabuf")
    silent, fine = await rig.open(rig.grant([1])), await rig.open(rig.grant([2]))
    for transfer in (silent, fine):
        transfer.write([Span(0, 2, (9,), (0,))])
    await until(lambda: rig.has_come(2, 1), what="the first half")
    rig.wire.hold()
    silent.write([Span(2, 4, (9,), (0,))])
    await until(lambda: rig.wire.num_held > 0, what="the doorbell")
    await rig.receiver.revoke(1)
    rig.target.blocks[1] = FILL
    rig.wire.release()
    fine.write([Span(2, 4, (9,), (0,))])
    assert await fine.commit(b"", timeout_s=10) == BLOCK
    rig.assert_arrived([9], [2])
    assert (rig.target.blocks[1] == FILL).all()
    with pytest.raises(TransportError):
        await silent.commit(b"", timeout_s=10)
