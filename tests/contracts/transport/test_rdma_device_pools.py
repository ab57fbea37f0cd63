"""Pools in a device's memory over rdma: staged, or as a dma-buf. What every transport promises is in the other files,
run on such pools too; here is what only they have. On network cards of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from distserve.errors import LeaseRevoked, PoolExhausted, TransportError, TransportUnavailable
from distserve.messages import RailOffer
from distserve.transport.base import Span, Transfer
from distserve.transport.factory import make_receiver, make_sender, unusable
from distserve.transport.landing import Landing
from distserve.transport.rdma.device import Nic
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.receiver import RdmaReceiver
from distserve.transport.rdma.sender import RdmaSender
from distserve.transport.staging_ring import StagingRing
from tests.contracts.transport.conftest import HAS_DEVICE, RDMA, Rig, commits_fine, everything
from tests.contracts.transport.fake_device import FakeDevice
from tests.waiting import until

pytestmark = pytest.mark.skipif(HAS_DEVICE, reason="for devices that this process makes up")
FILL = 0xA5
BLOCK = 8192


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def rig(stack: AsyncExitStack) -> AsyncIterator[Rig]:
    rig = await Rig("rdma-staged", stack).start()
    yield rig
    await all_is_back(rig)


async def started(stack: AsyncExitStack, kind: str, **settings: object) -> Rig:
    rig = Rig(kind, stack)
    for name, value in settings.items():
        setattr(rig, name, value)
    return await rig.start()


def ring_of(rig: Rig) -> StagingRing:
    assert isinstance(rig.sender, RdmaSender)
    ring = rig.sender._access.ring
    assert ring is not None
    return ring


def landing_of(rig: Rig) -> Landing:
    assert isinstance(rig.receiver, RdmaReceiver)
    landing = rig.receiver._devices.access.landing
    assert landing is not None
    return landing


def devices_of(rig: Rig) -> tuple[FakeDevice, FakeDevice]:
    """The sender's, the receiver's."""
    target, source = rig.devices[:2]
    return source, target


async def all_is_back(rig: Rig) -> None:
    """Every slot and every block of the landing is free again."""
    ring, landing = ring_of(rig), landing_of(rig)
    await until(lambda: ring.num_free == ring.num_slots, what="the slots")
    await until(lambda: landing.num_free == landing.num_blocks, what="the landing's blocks")
    ring.check()
    landing.check()


async def opened(rig: Rig, transfer: Transfer) -> None:
    await until(lambda: transfer.opened is not None, what="the keys")  # type: ignore[attr-defined]


async def stays(task: asyncio.Task[object]) -> None:
    """It has every chance to end, and does not."""
    for _ in range(20):
        await asyncio.sleep(0.002)
    assert not task.done()


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


# ---------------------------------------------------------------- fences


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
    await stays(revoke)  # type: ignore[arg-type]
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
    await stays(stop)  # type: ignore[arg-type]
    target.storing.release()
    async with asyncio.timeout(10):
        await stop
    assert landing.memory.fd is None
    rig.target.blocks[1] = FILL
    with pytest.raises(TransportError):
        await commit
    assert (rig.target.blocks[1] == FILL).all()
    assert not rig.commits


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


# ---------------------------------------------------------------- as a dma-buf


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


# ---------------------------------------------------------------- which way


@pytest.mark.parametrize("registers", [False, (True, False)])
async def test_a_network_card_that_takes_no_dmabuf_has_the_pool_staged(
    stack: AsyncExitStack, registers: bool | tuple[bool, ...]
) -> None:
    rig = await started(stack, "rdma-dmabuf", num_nics=2, registers_dmabufs=registers)
    assert isinstance(rig.receiver, RdmaReceiver)
    for end in (rig.sender, rig.receiver):
        assert end.pool_access.startswith("staged: the pool could not be registered as a dma-buf:")
        assert "registers no dma-buf" in end.pool_access
    assert [nic.counts()["regions"] for nic in rig.receiver._devices.nics] == [1, 1]  # the landing; no dma-buf is left
    await commits_fine(rig, rig.grant(list(range(1, 31))), list(range(30, 0, -1)), list(range(1, 31)))
    assert rig.target.blocks[1:31].any()


async def test_how_the_pool_is_got_at_is_said_once_and_can_be_asked_for(
    stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "distserve")
    for kind, said in (("rdma", "host: "), ("rdma-staged", "staged: "), ("rdma-dmabuf", "dmabuf: ")):
        caplog.clear()
        async with AsyncExitStack() as inner:
            rig = await Rig(kind, inner).start()
            assert rig.sender.pool_access.startswith(said)
            assert rig.receiver.pool_access.startswith(said)
            for i in (1, 2):
                await commits_fine(rig, rig.grant([i]), [i], [i])
            lines = [r.getMessage() for r in caplog.records if said in r.getMessage()]
            assert len(lines) == 2  # the sender's and the receiver's
            assert all(rig.shown(rig.source).device in line for line in lines)


async def test_dmabufs_can_be_turned_off(stack: AsyncExitStack) -> None:
    rig = await started(stack, "rdma-dmabuf")
    assert rig.fabric is not None
    options = replace(RDMA, use_dmabuf=False)
    sender = RdmaSender(
        rig.shown(rig.source), rig.sender_bus, sender_id="s", options=options, open_nics=rig.fabric.opener()
    )
    stack.push_async_callback(sender.stop)
    assert sender.pool_access == "staged: use_dmabuf is off"


@pytest.mark.parametrize(("ours", "theirs"), [("rdma-staged", ""), ("", "staged"), ("rdma-dmabuf", "staged")])
async def test_each_side_has_its_own_way(stack: AsyncExitStack, ours: str, theirs: str) -> None:
    rig = Rig(ours or "rdma", stack)
    await rig.start()
    rig.path = theirs
    rig.target = rig.add_pool()
    rig.receiver = await rig.add_receiver(rig.target)
    assert rig.sender.pool_access.split(":")[0] == (ours.partition("-")[2] or "host")
    assert rig.receiver.pool_access.split(":")[0] == (theirs or "host")
    await commits_fine(rig, rig.grant([5, 6, 9, 1]), [1, 2, 3, 40], [5, 6, 9, 1])


async def test_no_other_transport_takes_a_pool_that_it_cannot_touch(rig: Rig) -> None:
    memory = rig.shown(rig.source)
    for kind in ("shm", "tcp"):
        for make in (lambda kind=kind: make_sender(kind, memory, sender_id="s"), lambda: make_receiver(kind, memory)):  # type: ignore[misc] # noqa: B023
            with pytest.raises(TransportUnavailable, match=r"the pool is on fake:0 \(model.device\)") as caught:
                make()
            assert caught.value.fields["key"] == "model.device"
    assert unusable(memory, RdmaOptions()).keys() >= {"shm", "tcp"}


@pytest.mark.parametrize(("kind", "centre"), [("rdma-staged", "0000:1b:00.0"), ("rdma", "")])
async def test_devices_are_looked_for_near_the_gpu(stack: AsyncExitStack, kind: str, centre: str) -> None:
    rig = await Rig(kind, stack).start()
    asked: list[str] = []

    def near_what(options: RdmaOptions) -> Sequence[tuple[Nic, RailOffer]]:
        asked.append(options.near_pci)
        return rig.open_nics(options)

    memory = rig.shown(rig.source)
    sender = RdmaSender(memory, rig.sender_bus, sender_id="s", options=RDMA, open_nics=near_what)
    stack.push_async_callback(sender.stop)
    assert asked == [centre]
