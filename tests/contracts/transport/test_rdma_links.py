"""What only rdma has: links that are built anew under their leases, keys that open one lease to one pair, classes and
devices side by side. On devices of this process, or on real ones where there are any."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from distserve.errors import LayoutMismatch, LeaseRevoked, PeerLost, TransportError
from distserve.messages import ErrorReply, LinkRequest, decode, encode
from distserve.transport.base import Span
from distserve.transport.rdma import connect
from distserve.transport.rdma.device import Nic, Write
from distserve.transport.rdma.receiver import RdmaReceiver
from distserve.transport.rdma.sender import RdmaSender
from tests.contracts.transport.conftest import (
    FAST,
    HAS_DEVICE,
    RDMA,
    SLOW,
    Rig,
    everything,
    skip_where_devices_are_real,
)
from tests.contracts.transport.pools import SMALL
from tests.waiting import until

FILL = 0xA5
soft_only = pytest.mark.skipif(HAS_DEVICE, reason="for devices that this process makes up")


@pytest.fixture(params=("rdma", "rdma-staged"))
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    skip_where_devices_are_real(request)
    async with AsyncExitStack() as stack:
        yield await Rig(request.param, stack).start()


def nics(rig: Rig) -> list[Nic]:
    """The receiver's, then the sender's."""
    assert isinstance(rig.receiver, RdmaReceiver)
    assert isinstance(rig.sender, RdmaSender)
    return [*rig.receiver._devices.nics, *rig.sender._devices.nics]


async def test_eight_leases_go_on_over_a_new_link_and_the_bad_one_alone_fails(rig: Rig) -> None:
    """One writer keeps writing after its lease was taken back: refused by the device, which breaks the pair."""
    blocks = [[1 + 4 * i + k for k in range(4)] for i in range(8)]
    transfers = [await rig.open(rig.grant(ids)) for ids in blocks]
    for transfer, ids in zip(transfers, blocks, strict=True):
        transfer.write([Span(0, 2, tuple(ids), (0, 1, 2, 3))])
    await until(lambda: all(rig.has_come(i, 1) for ids in blocks for i in ids), what="the first half")
    wire = rig.add_proxy()
    wire.hold()
    transfers[3].write([Span(2, 4, tuple(blocks[3]), (0, 1, 2, 3))])
    await until(lambda: transfers[3]._coverage.num_placed == 16, what="the doorbell")  # type: ignore[attr-defined]
    began = time.monotonic()
    await rig.receiver.revoke(4)
    assert time.monotonic() - began < 2 * SLOW  # the writer could not answer: its windows were invalidated
    rig.target.blocks[blocks[3]] = FILL
    wire.release()
    for transfer, ids in zip(transfers, blocks, strict=True):
        transfer.write([Span(2, 4, tuple(ids), (0, 1, 2, 3))])
    outcomes = await asyncio.gather(*(t.commit(b"", timeout_s=10 * SLOW) for t in transfers), return_exceptions=True)
    assert isinstance(outcomes[3], LeaseRevoked)
    assert [o for i, o in enumerate(outcomes) if i != 3] == [4 * 8192] * 7
    for i, ids in enumerate(blocks):
        if i != 3:
            rig.assert_arrived(ids, ids)
    assert (rig.target.blocks[blocks[3]] == FILL).all()
    assert not rig.losses


async def test_a_key_opens_one_lease_to_one_pair_and_nothing_after_it(rig: Rig) -> None:
    """By hand, with the keys that a sender was given: beside the lease, by another pair, and after it has ended."""
    transfer = await rig.open(rig.grant([5, 6], lease_id=1))
    other = await rig.open(rig.grant([20], lease_id=2))
    other.write([Span(0, 1, (1,), (0,))])
    transfer.write([Span(0, 4, (1, 2), (0, 1))])
    await until(lambda: rig.has_come(6, 3), what="the writes")
    link, opened = transfer.link, transfer.opened  # type: ignore[attr-defined]
    run = opened.runs[connect.lane_for("prefill", 0)][0]
    sender = rig.sender
    assert isinstance(sender, RdmaSender)
    stray = rig.target.blocks[7].copy()
    for name, offset in (("prefill", 2 * 8192), ("background", 0)):  # beyond the run; by another pair
        if offset and HAS_DEVICE:
            continue  # Soft-RoCE (Linux 6.1) holds a window to its region's range, not to its own
        lane, address = connect.lane_for(name, 0), run.address + offset  # type: ignore[arg-type]
        pair = link.lanes[lane].pair
        write = Write(
            link.lanes[lane].uid << 32 | 77, sender._access.memory.address, 64, address, run.rkey, signaled=True
        )
        pair.post_writes([write], sender._devices.pools[0].lkey)
        broken = link
        await until(lambda broken=broken: broken.error is not None, 10 * SLOW, "the refusal")
        assert "access error" in str(broken.error) or "flushed" in str(broken.error)
        await until(
            lambda broken=broken: transfer.opened is not None and transfer.link is not broken,  # type: ignore[attr-defined]
            10 * SLOW,
            "the new link",
        )
        link = transfer.link  # type: ignore[attr-defined]
        run = transfer.opened.runs[connect.lane_for("prefill", 0)][0]  # type: ignore[attr-defined]
    assert np.array_equal(rig.target.blocks[7], stray)
    await transfer.commit(b"", timeout_s=5 * SLOW)
    rig.assert_arrived([1, 2], [5, 6])
    rig.target.blocks[[5, 6]] = FILL  # adopted, and perhaps somebody else's by now
    lane = link.lanes[connect.lane_for("prefill", 0)]
    late = Write(lane.uid << 32 | 78, sender._access.memory.address, 64, run.address, run.rkey, signaled=True)
    lane.pair.post_writes([late], sender._devices.pools[0].lkey)
    await until(lambda: link.error is not None, 10 * SLOW, "the refusal")
    assert (rig.target.blocks[[5, 6]] == FILL).all()
    other.write([Span(1, 4, (1,), (0,))])
    await other.commit(b"", timeout_s=5 * SLOW)
    rig.assert_arrived([1], [20])
    assert not rig.losses


async def test_a_hundred_broken_links_leave_nothing_behind(rig: Rig) -> None:
    async def round_trip(i: int) -> None:
        transfer = await rig.open(rig.grant([1 + i % 50], lease_id=7, epoch=i + 1))
        transfer.write(everything([2]))
        if i:
            rig.wire.cut()
        await transfer.commit(b"", timeout_s=10 * SLOW)

    await round_trip(0)
    before = [nic.counts() for nic in nics(rig)]
    fds = len(os.listdir("/proc/self/fd"))
    for i in range(1, 101):
        await round_trip(i)
    assert len(rig.commits) == 101
    assert not rig.losses
    await until(lambda: [nic.counts() for nic in nics(rig)] == before, 10, "the old links' end")
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert isinstance(rig.sender, RdmaSender)
    assert len(rig.sender._lanes) == len(connect.CLASSES)


async def test_a_commit_whose_answer_was_lost_is_answered_by_the_next_link(rig: Rig) -> None:
    adopted: list[int] = []

    def adopt_and_break(commit: object) -> None:
        adopted.append(1)
        rig.wire.cut()  # before the answer is sent

    rig.on_commit = adopt_and_break
    transfer = await rig.open(rig.grant([3, 4]))
    transfer.write(everything([5, 6]))
    assert await transfer.commit(b"state", timeout_s=10 * SLOW) == 2 * 8192
    assert adopted == [1]
    assert not rig.losses


async def test_a_silent_peer_with_open_leases_is_found_out(rig: Rig) -> None:
    """The sender's pairs vanish without a word, as when its process is killed: the receiver asks, and learns."""
    transfer = await rig.open(rig.grant([1]))
    transfer.write([Span(0, 1, (1,), (0,))])
    await until(lambda: rig.has_come(1, 0), what="the write")
    assert isinstance(rig.sender, RdmaSender)
    await rig.receiver_bus.close()  # it does not come back
    for pair in list(rig.wire.pairs):
        pair.close()
    assert isinstance(await rig.lost(1, 30), PeerLost)


async def test_classes_have_pairs_and_marks_of_their_own(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1, 2]))
    transfer.write([Span(0, 3, (1, 2), (0, 1))])
    transfer.write([Span(3, 4, (1, 2), (0, 1))], awaited=True)
    await transfer.commit(b"", timeout_s=5 * SLOW)
    background = await rig.sender.open(rig.grant([3]), timeout_s=5 * SLOW, traffic_class="background")
    background.write([Span(0, 4, (3,), (0,))], awaited=True)
    await background.commit(b"", timeout_s=5 * SLOW)
    rig.assert_arrived([1, 2, 3], [1, 2, 3])
    if not HAS_DEVICE:
        fabric = nics(rig)[0].fabric  # type: ignore[attr-defined]
        assert fabric.bytes_by_class == {34 << 2: 2 * 3 * 2048, 48 << 2: 2 * 2048, 0: 8192}
    address = rig.receiver.endpoint.address
    assert isinstance(rig.sender, RdmaSender)
    assert isinstance(rig.receiver, RdmaReceiver)
    sent, received = rig.sender._meter.snapshot(), rig.receiver._meter.snapshot()
    by_class = {flow.traffic_class: (t.num_leases, t.num_bytes) for flow, t in sent.items()}
    assert by_class == {"prefill": (1, 2 * 3 * 2048), "decode": (0, 2 * 2048), "background": (1, 8192)}
    by_class = {flow.traffic_class: (t.num_leases, t.num_bytes) for flow, t in received.items()}
    assert by_class == {"prefill": (1, 2 * 3 * 2048), "decode": (0, 2 * 2048), "background": (1, 8192)}
    assert {flow.peer for flow in received} == {"prefill-0"}
    assert {flow.peer for flow in sent} == {address}


async def test_neighbours_travel_in_one_write_under_one_doorbell(rig: Rig) -> None:
    assert isinstance(rig.sender, RdmaSender)
    transfer = await rig.open(rig.grant(list(range(10, 42))))
    await until(lambda: transfer.opened is not None, 5 * SLOW, "the keys")  # type: ignore[attr-defined]
    before = rig.sender.counts.writes
    transfer.write(everything(list(range(1, 33))))
    await transfer.commit(b"", timeout_s=5 * SLOW)
    most = 1 if rig.path != "staged" else 16  # 32 blocks in a row, or a slot of two at a time
    assert rig.sender.counts.writes - before <= most + 1  # and the ticket, unless it rode along


async def test_set_up_under_an_old_epoch_is_refused(rig: Rig) -> None:
    await (await rig.open(rig.grant([1]))).abort("only the link")
    assert isinstance(rig.sender, RdmaSender)
    instance = rig.sender._dialer._instance
    request = LinkRequest(
        sender_id="prefill-0", instance=instance, epoch=1, layout=SMALL, rails=await _offers(rig.sender)
    )
    answer = await rig.sender_bus.request(connect.subject(rig.receiver.endpoint.address), encode(request), timeout_s=5)
    reply = decode(answer)
    assert isinstance(reply, ErrorReply)
    assert "epoch 1" in reply.message
    empty = msgspec.structs.replace(request, epoch=9, rails=[])
    answer = await rig.sender_bus.request(connect.subject(rig.receiver.endpoint.address), encode(empty), timeout_s=5)
    assert "3 for each" in decode(answer).message


async def _offers(sender: RdmaSender) -> list[object]:
    halves = await sender._reactor.run(lambda: sender._devices.make_halves(sender._options))
    offers = halves.offers()
    await sender._reactor.run(halves.close)
    return offers  # type: ignore[return-value]


async def test_a_layout_of_another_size_is_refused_before_any_pair_is_made(rig: Rig) -> None:
    other = msgspec.structs.replace(SMALL, num_layers=2)
    sender = rig.add_sender(rig.add_pool(layout=other), "prefill-1")
    region = msgspec.structs.replace(rig.grant([1]), layout=other)
    with pytest.raises(LayoutMismatch):
        await sender.open(region, timeout_s=5)


async def test_a_stale_set_up_that_never_says_hello_is_cleared_away(rig: Rig) -> None:
    assert isinstance(rig.sender, RdmaSender)
    before = nics(rig)[0].counts()["pairs"]
    request = LinkRequest(sender_id="ghost", instance="ghost", epoch=1, layout=SMALL, rails=await _offers(rig.sender))
    await rig.sender_bus.request(connect.subject(rig.receiver.endpoint.address), encode(request), timeout_s=5)
    assert nics(rig)[0].counts()["pairs"] == before + len(connect.CLASSES)
    await until(lambda: nics(rig)[0].counts()["pairs"] == before, 10 * SLOW, "the ghost's end")


# ---------------------------------------------------------------- devices that real machines here do not have


async def _soft_rig(stack: AsyncExitStack, *, num_nics: int, has_windows: bool = True, mtu: int = 4096) -> Rig:
    rig = Rig("rdma", stack)
    rig.num_nics, rig.has_windows, rig.mtu = num_nics, has_windows, mtu
    return await rig.start()


@soft_only
async def test_blocks_are_striped_over_several_devices() -> None:
    async with AsyncExitStack() as stack:
        rig = await _soft_rig(stack, num_nics=3)
        transfer = await rig.open(rig.grant(list(range(1, 61))))
        transfer.write(everything(list(range(60, 0, -1))))
        await until(lambda: len(transfer.used) == 3, what="three devices")  # type: ignore[attr-defined]
        await transfer.commit(b"", timeout_s=5)
        rig.assert_arrived(list(range(60, 0, -1)), list(range(1, 61)))
        assert len(nics(rig)) == 6
        assert all(nic.counts()["windows"] == 0 for nic in nics(rig))  # the lease is over


@soft_only
async def test_every_device_carries_its_stripes_and_a_ticket() -> None:
    async with AsyncExitStack() as stack:
        rig = await _soft_rig(stack, num_nics=2)
        transfer = await rig.open(rig.grant(list(range(1, 33))))
        transfer.write([Span(0, 4, tuple(range(1, 25)), tuple(range(24)))])
        await until(lambda: set(transfer.used) == {1, 4}, what="both devices")  # type: ignore[attr-defined]
        transfer.write([Span(0, 4, tuple(range(25, 33)), tuple(range(24, 32)))], awaited=True)
        await until(lambda: set(transfer.used) == {1, 4, 3}, what="the awaited stripe")  # type: ignore[attr-defined]
        await transfer.commit(b"", timeout_s=5)
        rig.assert_arrived(list(range(1, 33)), list(range(1, 33)))


@soft_only
async def test_without_windows_a_silent_writer_loses_its_pairs_and_the_other_leases_go_on() -> None:
    async with AsyncExitStack() as stack:
        rig = await _soft_rig(stack, num_nics=1, has_windows=False)
        silent, fine = await rig.open(rig.grant([1])), await rig.open(rig.grant([2]))
        for transfer in (silent, fine):
            transfer.write([Span(0, 2, (9,), (0,))])
        await until(lambda: rig.has_come(2, 1), what="the first half")
        wire = rig.add_proxy()
        wire.hold()
        silent.write([Span(2, 4, (9,), (0,))])
        await until(lambda: silent._coverage.num_placed == 4, what="the doorbell")  # type: ignore[attr-defined]
        await rig.receiver.revoke(1)
        rig.target.blocks[1] = FILL
        wire.release()
        fine.write([Span(2, 4, (9,), (0,))])
        assert await fine.commit(b"", timeout_s=5) == 8192
        rig.assert_arrived([9], [2])
        assert (rig.target.blocks[1] == FILL).all()
        with pytest.raises((LeaseRevoked, TransportError)):
            await silent.commit(b"", timeout_s=5)


@soft_only
async def test_the_smaller_mtu_of_both_ends_is_used() -> None:
    async with AsyncExitStack() as stack:
        rig = await _soft_rig(stack, num_nics=1)
        fabric = nics(rig)[0].fabric  # type: ignore[attr-defined]
        small = RdmaSender(
            rig.add_pool(seed=3),
            rig.sender_bus,
            sender_id="small",
            options=RDMA,
            open_nics=fabric.opener(mtu=1024),
        )
        stack.push_async_callback(small.stop)
        transfer = await small.open(rig.grant([1]), timeout_s=5)
        await transfer.abort("seen enough")
        mine = [pair for pair in fabric.pairs.values() if pair.mtu == 1024]
        assert len(mine) == 2 * len(connect.CLASSES)


@soft_only
async def test_no_common_subnet_is_an_error_that_names_both_sides() -> None:
    async with AsyncExitStack() as stack:
        rig = await _soft_rig(stack, num_nics=1)
        fabric = nics(rig)[0].fabric  # type: ignore[attr-defined]

        def v6_only(options: object) -> list[object]:
            return [
                (nic, msgspec.structs.replace(offer, gids=((0, "fe80:0000:0000:0000:0000:0000:0000:0001", 64),)))
                for nic, offer in fabric.opener()(options)
            ]

        stranger = RdmaSender(
            rig.add_pool(seed=3),
            rig.sender_bus,
            sender_id="stranger",
            options=replace(RDMA, common=FAST),
            open_nics=v6_only,  # type: ignore[arg-type]
        )
        stack.push_async_callback(stranger.stop)
        with pytest.raises(TransportError, match=r"no RDMA path to stranger: its GIDs fe80.*, ours 0000.*0a4d"):
            await stranger.open(rig.grant([1]), timeout_s=5)
