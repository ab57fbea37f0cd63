"""How rdma's leases, links and threads end when something goes wrong at a bad moment. On devices of this process, which
can be made to fail where real ones hardly do."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from distserve.errors import BusError, BusTimeout, PeerLost, TransportError, TransportUnavailable
from distserve.transport import framing
from distserve.transport.base import Lease, Span, Transfer
from distserve.transport.rdma import frames
from distserve.transport.rdma.device import Completion
from distserve.transport.rdma.receiver import RdmaReceiver
from distserve.transport.rdma.sender import RdmaSender
from tests.contracts.transport.conftest import FAST, HAS_DEVICE, RDMA, Rig, everything
from tests.contracts.transport.soft_nic import SoftNic
from tests.waiting import until

pytestmark = pytest.mark.skipif(HAS_DEVICE, reason="for devices that this process makes up")
FILL = 0xA5


@pytest.fixture(params=("rdma", "rdma-staged"))
async def rig(request: pytest.FixtureRequest, stack: AsyncExitStack) -> Rig:
    return await Rig(request.param, stack).start()


def nic_of(owner: object) -> SoftNic:
    nic = owner._devices.nics[0]  # type: ignore[attr-defined]
    return getattr(nic, "_nic", nic)  # a sender's is behind the wire


async def half_written(rig: Rig, num_blocks: int = 1) -> Transfer:
    """A lease of blocks 1.. whose second half is posted and held back."""
    transfer = await rig.open(rig.grant(list(range(1, num_blocks + 1))))
    targets = tuple(range(num_blocks))
    transfer.write([Span(0, 2, tuple(t + 1 for t in targets), targets)])
    await until(lambda: rig.has_come(num_blocks, 1), what="the first half")
    rig.wire.hold()
    transfer.write([Span(2, 4, tuple(t + 1 for t in targets), targets)])
    await until(lambda: transfer._coverage.num_placed == 4 * num_blocks, what="the doorbell")  # type: ignore[attr-defined]
    return transfer


async def assert_nothing_lands(rig: Rig, num_blocks: int = 1) -> None:
    """The blocks are somebody else's; what was held back goes out now."""
    rig.target.blocks[1 : num_blocks + 1] = FILL
    assert rig.wire.num_held, "a test of late writes without any"
    rig.wire.release()
    await until(nic_of(rig.receiver).fabric.is_idle, what="the late writes' end")
    assert (rig.target.blocks[1 : num_blocks + 1] == FILL).all()


async def test_a_device_without_windows_beside_one_with_them_is_fenced_too(stack: AsyncExitStack) -> None:
    rig = Rig("rdma", stack)
    rig.num_nics = 2
    rig.has_windows = (True, False)
    await rig.start()
    silent = await half_written(rig, 16)
    await rig.receiver.revoke(1)
    await assert_nothing_lands(rig, 16)
    await silent.abort("over")


async def test_a_second_revoke_waits_for_the_same_fence_as_the_first(rig: Rig) -> None:
    await half_written(rig)
    first = asyncio.create_task(rig.receiver.revoke(1))
    await until(lambda: rig.receiver.idle_s(1) is None, what="the first")
    first.cancel()  # its owner gave up waiting; the fence goes on
    await rig.receiver.revoke(1)
    await assert_nothing_lands(rig)


async def test_a_revoke_while_the_receiver_stops_waits_for_the_end_of_its_pairs(rig: Rig) -> None:
    await half_written(rig)
    stopping = asyncio.create_task(rig.receiver.stop())
    await until(lambda: rig.receiver.idle_s(1) is None, what="the beginning of the end")
    stopping.cancel()
    await rig.receiver.revoke(1)
    await assert_nothing_lands(rig)
    await rig.receiver.stop()
    assert not nic_of(rig.receiver).counts()["pairs"]


async def test_a_device_that_is_gone_ends_everything_that_waits(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1]))
    transfer.write([Span(0, 2, (2,), (0,))])
    await until(lambda: rig.has_come(1, 1), what="the first half")

    def gone(most: int = 64) -> list[Completion]:
        raise OSError(5, "the device was taken out")

    assert isinstance(rig.sender, RdmaSender)
    assert isinstance(rig.receiver, RdmaReceiver)
    for owner in (rig.receiver, rig.sender):
        nic_of(owner).poll = gone  # type: ignore[method-assign]
        owner._reactor.call(lambda: None)
    await until(lambda: not rig.receiver._reactor._thread.is_alive(), what="the thread's end")  # type: ignore[attr-defined]
    async with asyncio.timeout(5):
        await rig.receiver.revoke(1)
        with pytest.raises(PeerLost):
            await transfer.commit(b"", timeout_s=1)
        await rig.receiver.stop()
        await rig.sender.stop()


async def test_a_pair_that_cannot_be_destroyed_keeps_nothing_else_alive(stack: AsyncExitStack) -> None:
    rig = Rig("rdma", stack)
    rig.has_windows = False
    await rig.start()
    await half_written(rig)
    assert isinstance(rig.receiver, RdmaReceiver)
    link = next(iter(rig.receiver._links._links.values()))
    pair = link.lanes[1].pair
    destroy = pair.close

    def refuse() -> None:
        raise OSError(16, "the queue pair is busy")

    pair.close = refuse  # type: ignore[method-assign]
    async with asyncio.timeout(5):
        await rig.receiver.revoke(1)
    links = rig.receiver._links._links
    await until(lambda: link not in links.values(), what="the link's end")
    destroy()
    rig.wire.release()


async def test_a_start_that_was_cancelled_can_be_stopped(rig: Rig) -> None:
    def slowly(options: object) -> object:
        time.sleep(0.3)
        return rig.open_nics(options)  # type: ignore[arg-type]

    receiver = RdmaReceiver(rig.add_pool(), rig.receiver_bus, options=RDMA, open_nics=slowly)  # type: ignore[arg-type]
    starting = asyncio.create_task(receiver.start(lambda _: None, lambda *_: None))
    await until(lambda: receiver._reactor._thread.is_alive(), what="the thread")
    starting.cancel()
    await asyncio.wait({starting})
    async with asyncio.timeout(5):
        await receiver.stop()
    assert not receiver._reactor._thread.is_alive()


async def test_a_start_that_the_bus_refuses_leaves_no_thread(rig: Rig) -> None:
    bus = await rig.add_bus()
    await bus.close()
    receiver = RdmaReceiver(rig.add_pool(), bus, options=RDMA, open_nics=rig.open_nics)
    with pytest.raises(BusError):
        await receiver.start(lambda _: None, lambda *_: None)
    assert not receiver._reactor._thread.is_alive()


async def test_the_patience_with_a_broken_link_counts_from_its_own_break(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1]))
    transfer.write([Span(0, 1, (2,), (0,))])
    assert isinstance(rig.receiver, RdmaReceiver)
    links = rig.receiver._links._links
    broken_at = time.monotonic()
    for _ in range(3):
        link = next(iter(links.values()))
        rig.receiver._reactor.call(lambda link=link: link.fail(PeerLost("on purpose")))  # type: ignore[misc]
        again = time.monotonic() + FAST.peer_timeout_s / 2
        await until(lambda again=again: time.monotonic() > again and bool(links), what="the next link")  # type: ignore[misc]
    assert time.monotonic() - broken_at > FAST.peer_timeout_s
    assert not rig.losses
    transfer.write([Span(1, 4, (2,), (0,))])
    await transfer.commit(b"", timeout_s=5)
    rig.assert_arrived([2], [1])


async def test_links_of_dead_senders_do_not_pile_up_though_nothing_is_open_on_them(rig: Rig) -> None:
    before = nic_of(rig.receiver).counts()
    for i in range(3):
        sender = rig.add_sender(rig.add_pool(seed=1), f"prefill-{i}")
        transfer = await sender.open(rig.grant([1 + i]), timeout_s=5)
        transfer.write(everything([2]))
        await transfer.commit(b"", timeout_s=5)
        assert isinstance(sender, RdmaSender)
        lanes = list(sender._lanes.values())
        for peer in sender._peers.values():
            assert peer.link is not None
            assert peer.link._ping_timer is not None
            peer.link._ping_timer.cancel()

        def vanish(lanes: list[object] = lanes) -> None:  # type: ignore[assignment]
            for lane in lanes:
                lane.pair.close()  # type: ignore[attr-defined]

        await sender._reactor.run(vanish)
    await until(lambda: nic_of(rig.receiver).counts() == before, 20, "the end of their links")


async def test_a_window_that_cannot_be_made_fails_that_lease_alone(rig: Rig) -> None:
    others = [await rig.open(rig.grant([1 + 4 * i])) for i in range(3)]
    for transfer in others:
        transfer.write([Span(0, 1, (2,), (0,))])
    await until(lambda: all(rig.has_come(1 + 4 * i, 0) for i in range(3)), what="the first layers")
    nic, made = nic_of(rig.receiver), 0
    make = nic.window

    def second_fails() -> object:
        nonlocal made
        made += 1
        if made == 2:
            raise OSError(12, "no more windows")
        return make()

    nic.window = second_fails  # type: ignore[method-assign, assignment]
    link = others[0].link  # type: ignore[attr-defined]
    await rig.open(rig.grant([60, 62], lease_id=9))
    assert "no more windows" in str(await rig.lost(9))
    for transfer in others:
        transfer.write([Span(1, 4, (2,), (0,))])
        await transfer.commit(b"", timeout_s=5)
    assert link.error is None


async def test_a_commit_waits_until_the_device_needs_the_source_no_more(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1]))
    await until(lambda: transfer.opened is not None, what="the keys")  # type: ignore[attr-defined]
    link = transfer.link  # type: ignore[attr-defined]
    nic, uid, held = nic_of(rig.sender), link.lanes[1].uid, []
    poll = nic.poll

    def late(most: int = 64) -> list[Completion]:
        seen = poll(most)
        held.extend(c for c in seen if c.wr_id >> 32 == uid)
        return [c for c in seen if c.wr_id >> 32 != uid]

    nic.poll = late  # type: ignore[method-assign]
    transfer.write(everything([2]))
    commit = asyncio.create_task(transfer.commit(b"", timeout_s=10))
    await until(lambda: bool(rig.commits and held), what="the adoption")
    assert not commit.done()
    nic.poll = poll  # type: ignore[method-assign]
    reactor = rig.sender._reactor  # type: ignore[attr-defined]
    reactor.call(lambda: [reactor._on_completion(0, c) for c in held])
    assert await commit == 8192


async def test_one_set_up_request_that_is_lost_costs_a_moment(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1]))
    transfer.write(everything([2]))
    ask, num_asked = rig.sender_bus.request, 0

    async def request(subject: str, data: bytes, *, timeout_s: float, headers: object = None) -> bytes:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            await asyncio.sleep(timeout_s)
            raise BusTimeout("nobody heard")
        return await ask(subject, data, timeout_s=timeout_s)

    rig.sender_bus.request = request  # type: ignore[method-assign, assignment]
    rig.wire.cut()
    assert await transfer.commit(b"", timeout_s=10) == 8192
    assert num_asked == 2


async def test_one_lease_opened_twice_at_once_is_refused_once_and_breaks_nothing(rig: Rig) -> None:
    region = rig.grant([1])
    opened = await asyncio.gather(rig.open(region), rig.open(region), return_exceptions=True)
    assert sorted(type(o).__name__ for o in opened) == ["RdmaTransfer", "TransportError"]
    transfer = next(o for o in opened if isinstance(o, Transfer))
    transfer.write(everything([2]))
    await transfer.commit(b"", timeout_s=5)
    assert [p.epoch for p in rig.sender._peers.values()] == [1]  # type: ignore[attr-defined]


async def test_a_sender_that_stops_says_so_to_whoever_opens(rig: Rig) -> None:
    async def never(subject: str, data: bytes, *, timeout_s: float, headers: object = None) -> bytes:
        await asyncio.Event().wait()
        return b""

    rig.sender_bus.request = never  # type: ignore[method-assign, assignment]
    opening = asyncio.create_task(rig.open(rig.grant([1])))
    peers = rig.sender._peers  # type: ignore[attr-defined]
    await until(lambda: any(p.attempt is not None for p in peers.values()), what="the attempt")
    await rig.sender.stop()
    with pytest.raises(TransportUnavailable, match="has stopped"):
        await opening


@pytest.mark.parametrize("depth", [16, 32])
async def test_a_small_depth_works(rig: Rig, stack: AsyncExitStack, depth: int) -> None:
    options = replace(RDMA, depth=depth)
    target = rig.shown(rig.add_pool())
    receiver = RdmaReceiver(target, rig.receiver_bus, options=options, open_nics=rig.open_nics)
    await receiver.start(lambda _: None, lambda *_: None)
    stack.push_async_callback(receiver.stop)
    source = rig.shown(rig.source)
    sender = RdmaSender(source, rig.sender_bus, sender_id="d", options=options, open_nics=rig.open_nics)
    stack.push_async_callback(sender.stop)
    transfer = await sender.open(receiver.grant(Lease(1, 1, list(range(1, 61)), 10.0)), timeout_s=5)
    for layer in range(4):
        transfer.write([Span(layer, layer + 1, tuple(range(1, 61)), tuple(range(60)))])
    assert await transfer.commit(os.urandom(300_000), timeout_s=5) == 60 * 8192


async def test_garbage_in_a_frame_cuts_the_link_and_the_lease_goes_on(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1]))
    transfer.write([Span(0, 2, (2,), (0,))])
    assert isinstance(rig.receiver, RdmaReceiver)
    await until(lambda: transfer.opened is not None, what="the keys")  # type: ignore[attr-defined]
    link = next(iter(rig.receiver._links._links.values()))
    first = transfer.link  # type: ignore[attr-defined]
    lost = framing.Lost(1, 1, ("peer_lost", "m", {"message": "twice"}))
    rig.receiver._reactor.call(lambda: link.send(frames.Kind.LOST, lost))
    await until(lambda: first.error is not None, what="the cut")
    assert isinstance(first.error, TransportError)
    transfer.write([Span(2, 4, (2,), (0,))])
    await transfer.commit(b"", timeout_s=5)
    rig.assert_arrived([2], [1])
