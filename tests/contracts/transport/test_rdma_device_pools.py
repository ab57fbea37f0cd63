"""Pools in a device's memory over rdma: new links, faults of the device, bounded memory. What every transport promises
is in the other files, run on such pools too; here is what only they have. On network cards of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from distserve.errors import LeaseRevoked, PoolExhausted, TransportError
from distserve.transport.base import Span
from distserve.transport.rdma.receiver import RdmaReceiver
from distserve.transport.rdma.sender import RdmaSender
from tests.contracts.transport.conftest import HAS_DEVICE, Rig, commits_fine, everything
from tests.contracts.transport.device_rig import BLOCK, all_is_back, devices_of, landing_of, opened, ring_of, started
from tests.waiting import until

pytestmark = pytest.mark.skipif(HAS_DEVICE, reason="for devices that this process makes up")


@pytest.fixture
async def rig(stack: AsyncExitStack) -> AsyncIterator[Rig]:
    rig = await Rig("rdma-staged", stack).start()
    yield rig
    await all_is_back(rig)


# ---------------------------------------------------------------- a link that is built anew


@pytest.mark.parametrize("kind", ["rdma-staged", "rdma-dmabuf"])
async def test_a_new_link_is_written_from_the_first_block(stack: AsyncExitStack, kind: str) -> None:
    rig = await started(stack, kind)
    source, target = devices_of(rig)
    transfer = await rig.open(rig.grant(list(range(1, 41))))
    transfer.write([Span(0, 2, tuple(range(1, 41)), tuple(range(40)))])
    await until(lambda: rig.has_come(40, 1), what="the first half")
    num_fetched, num_sent = len(source.fetched), rig.wire.forwarded
    assert isinstance(rig.sender, RdmaSender)
    rig.wire.cut()
    transfer.write([Span(2, 4, tuple(range(1, 41)), tuple(range(40)))])
    await transfer.commit(b"", timeout_s=10)
    rig.assert_arrived(list(range(1, 41)), list(range(1, 41)))
    assert rig.wire.forwarded - num_sent >= 40 * BLOCK  # not the second half alone
    if kind == "rdma-staged":
        layers = [layer for span in source.fetched[num_fetched:] for layer in range(span.layer_start, span.layer_stop)]
        assert set(layers) == {0, 1, 2, 3}
        assert target.stored == [tuple(range(1, 41))]  # once
        await all_is_back(rig)


async def test_a_link_that_breaks_while_a_slot_is_filled_takes_nothing_with_it(rig: Rig) -> None:
    source, _ = devices_of(rig)
    transfer = await rig.open(rig.grant(list(range(1, 21))))
    await opened(rig, transfer)
    source.fetching.hold()
    transfer.write(everything(list(range(31, 51))))  # ten pieces
    ring = ring_of(rig)
    await until(lambda: source.fetching.num_waiting == 1 and not ring.num_free, what="copies into all slots")
    first = transfer.link  # type: ignore[attr-defined]
    rig.wire.cut()
    await until(lambda: transfer.link is not first and transfer.opened is not None, what="the next link")  # type: ignore[attr-defined]
    source.fetching.release()
    await transfer.commit(b"", timeout_s=10)
    rig.assert_arrived(list(range(31, 51)), list(range(1, 21)))
    assert len(source.fetched) == ring.num_slots + 10  # what was still queued for the first link was skipped


# ---------------------------------------------------------------- faults of the device


async def test_a_copy_that_fails_on_the_way_out_fails_its_transfer_alone(rig: Rig) -> None:
    ring = ring_of(rig)
    fetch = ring._copier.fetch

    def broken(piece: Span, rows: object, after: object) -> object:
        if 13 in piece.source_blocks:
            raise TransportError("illegal address")
        return fetch(piece, rows, after)  # type: ignore[arg-type]

    ring._copier.fetch = broken  # type: ignore[method-assign, assignment]
    bad, good = await rig.open(rig.grant([1])), await rig.open(rig.grant([2]))
    bad.write(everything([13]))
    good.write(everything([14]))
    with pytest.raises(TransportError, match="illegal address"):
        await bad.commit(b"", timeout_s=10)
    assert "illegal address" in str(await rig.lost(1))
    await good.commit(b"", timeout_s=10)
    rig.assert_arrived([14], [2])


async def test_a_copy_that_fails_on_the_way_in_loses_its_lease_alone(rig: Rig) -> None:
    copier = landing_of(rig)._copier
    store = copier.store

    def broken(blocks: object, landed: object, block_ids: tuple[int, ...]) -> object:
        if 13 in block_ids:
            raise RuntimeError("launch failure")
        return store(blocks, landed, block_ids)  # type: ignore[arg-type]

    copier.store = broken  # type: ignore[method-assign, assignment]
    bad, good = await rig.open(rig.grant([13])), await rig.open(rig.grant([2]))
    bad.write(everything([13]))
    good.write(everything([14]))
    with pytest.raises(TransportError, match="launch failure"):
        await bad.commit(b"", timeout_s=10)
    assert "launch failure" in str(await rig.lost(1))
    await good.commit(b"", timeout_s=10)
    rig.assert_arrived([14], [2])


# ---------------------------------------------------------------- bounded memory


async def test_a_peer_that_takes_nothing_holds_the_slots_and_nobodys_event_loop(rig: Rig) -> None:
    source, _ = devices_of(rig)
    transfer = await rig.open(rig.grant(list(range(1, 61))))
    await opened(rig, transfer)
    rig.wire.hold()
    transfer.write(everything(list(range(1, 61))))
    ring = ring_of(rig)
    await until(lambda: ring.num_free == 0 and rig.wire.num_held == ring.num_slots, what="every slot's write")
    assert len(source.fetched) == ring.num_slots  # and no more, of 30
    rig.wire.release()
    await transfer.commit(b"", timeout_s=10)
    rig.assert_arrived(list(range(1, 61)), list(range(1, 61)))


async def test_leases_that_find_no_room_in_the_landing_wait_in_order(stack: AsyncExitStack) -> None:
    rig = await started(stack, "rdma-staged", landing_bytes=5 * BLOCK)
    transfers = [await rig.open(rig.grant([10 * i + k for k in range(1, 4)])) for i in range(4)]
    for i, transfer in enumerate(transfers):
        transfer.write(everything([20 + i, 30 + i, 40 + i]))
    await opened(rig, transfers[0])
    assert isinstance(rig.receiver, RdmaReceiver)
    room = rig.receiver._links._room
    await until(lambda: room.num_waiting == 3, what="the others' asking")  # type: ignore[attr-defined]
    assert all(transfer.opened is None for transfer in transfers[1:])  # type: ignore[attr-defined]
    await rig.receiver.revoke(2)  # while it waits
    await until(lambda: transfers[1].failure is not None, what="its writer's knowing")
    await transfers[3].abort("changed its mind")
    assert landing_of(rig).num_free == 2
    await transfers[0].commit(b"", timeout_s=10)
    await transfers[2].commit(b"", timeout_s=10)
    rig.assert_arrived([22, 32, 42], [21, 22, 23])
    with pytest.raises(LeaseRevoked):
        await transfers[1].commit(b"", timeout_s=10)
    assert [commit.lease_id for commit in rig.commits] == [1, 3]
    await all_is_back(rig)


async def test_a_lease_that_is_larger_than_the_landing_is_refused_by_name(stack: AsyncExitStack) -> None:
    rig = await started(stack, "rdma-staged", landing_bytes=5 * BLOCK)
    transfer = await rig.open(rig.grant(list(range(1, 7))))
    transfer.write(everything(list(range(1, 7))))
    with pytest.raises(
        TransportError, match="has 6 blocks, the staging memory that it must land in has 5: raise landing"
    ):
        await transfer.commit(b"", timeout_s=10)
    assert (await rig.lost(1)).fields["key"] == "landing_bytes"  # type: ignore[attr-defined]
    await commits_fine(rig, rig.grant(list(range(1, 6))), list(range(1, 6)), list(range(1, 6)))
    with pytest.raises(PoolExhausted):
        landing_of(rig).reserve(6)
