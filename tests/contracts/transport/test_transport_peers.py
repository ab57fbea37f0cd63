"""Peers and connections that break: how soon it is known, and that it fails their leases and nothing else. On every
transport."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import msgspec
import pytest

from distserve.errors import (
    DistServeError,
    PeerLost,
    TransportUnavailable,
)
from distserve.messages import Endpoint, RemoteRegion
from distserve.transport.base import Lease, Span
from tests.contracts.transport.conftest import SLOW, Rig, commits_fine, everything
from tests.contracts.transport.proxy import UNIX
from tests.waiting import until

FILL = 0xA5


async def test_a_cut_in_the_middle_fails_the_lease_on_both_sides(rig: Rig) -> None:
    proxy = rig.add_proxy()
    transfer = await rig.open(proxy.redirect(rig.grant(list(range(1, 41)))))
    proxy.cut_after = proxy.forwarded + (300 if rig.kind in UNIX else 100_000)
    transfer.write(everything(list(range(1, 41))))
    if rig.heals:
        await transfer.commit(b"", timeout_s=5)
        rig.assert_arrived(list(range(1, 41)), list(range(1, 41)))
        assert not rig.losses
        return
    with pytest.raises(PeerLost):
        await transfer.commit(b"", timeout_s=5)
    assert isinstance(await rig.lost(1), PeerLost)
    assert not rig.commits
    await transfer.abort("after the fact")
    rig.target.blocks[:] = FILL
    proxy.cut_after = None
    await commits_fine(rig, proxy.redirect(rig.grant([50])), [2], [50])  # the same peer, at once
    assert (rig.target.blocks[1:41] == FILL).all()


async def test_an_idle_connection_that_is_cut_loses_its_leases_without_a_commit(rig: Rig) -> None:
    proxy = rig.add_proxy()
    transfers = [await rig.open(proxy.redirect(rig.grant([i]))) for i in (1, 2, 3)]
    for transfer in transfers:
        transfer.write([Span(0, 1, (1,), (0,))])
    await until(lambda: rig.has_come(3, 0), what="the writes")
    await rig.cut_for_good(proxy)
    for i in (1, 2, 3):
        assert isinstance(await rig.lost(i), PeerLost)
    await until(lambda: all(isinstance(t.failure, PeerLost) for t in transfers), what="the sender's knowing")


async def test_a_sender_killed_in_mid_transfer_loses_its_lease_and_the_blocks_are_reusable(rig: Rig) -> None:
    block_ids = list(range(1, 61))
    process = await rig.spawn("send", msgspec.json.encode(rig.grant(block_ids)).decode())
    await until(lambda: any(rig.has_come(i, 0) for i in range(1, 61)), 30 * SLOW, "the victim's writes")
    process.send_signal(signal.SIGKILL)
    error = await rig.lost(1)
    assert isinstance(error, PeerLost)
    assert "victim" in str(error)
    assert rig.receiver.idle_s(1) is None
    rig.target.blocks[:] = FILL
    await commits_fine(rig, rig.grant(block_ids[:30]), block_ids[:30], block_ids[:30])
    assert (rig.target.blocks[31:61] == FILL).all()


async def test_a_receiver_killed_in_mid_transfer_is_a_lost_peer_and_another_serves(rig: Rig) -> None:
    process = await rig.spawn("receive", rig.kind)
    assert process.stdout is not None
    regions = [msgspec.json.decode(await _line(process), type=RemoteRegion) for _ in range(3)]
    good = await rig.open(regions[0])
    good.write(everything(list(range(1, 21))))
    assert await good.commit(b"", timeout_s=5) == 20 * 8192
    assert await _line(process) == b"commit 1\n"
    doomed = [await rig.open(region) for region in regions[1:]]
    process.send_signal(signal.SIGKILL)
    for transfer in doomed:
        for _ in range(100):
            transfer.write([Span(0, 4, tuple(range(1, 21)), tuple(range(20)))])
    started = time.monotonic()
    for transfer in doomed:
        with pytest.raises(PeerLost):
            await transfer.commit(b"", timeout_s=5)
    assert time.monotonic() - started < 5
    with pytest.raises((TransportUnavailable, PeerLost)):  # PeerLost: it took the connection while it was dying
        await rig.sender.open(regions[1], timeout_s=1)
    await commits_fine(rig, rig.grant([1, 2]), [3, 4], [1, 2])


async def test_a_frozen_receiver_is_bounded_by_the_timeout(rig: Rig) -> None:
    process = await rig.spawn("receive", rig.kind)
    regions = [msgspec.json.decode(await _line(process), type=RemoteRegion) for _ in range(3)]
    transfer = await rig.open(regions[0])
    process.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        for _ in range(200):  # 32 MB: more than sockets hold
            transfer.write([Span(0, 4, tuple(range(1, 21)), tuple(range(20)))])
        assert time.monotonic() - started < 1  # queued, not sent
        with pytest.raises(PeerLost, match="not acknowledged within 1"):
            await transfer.commit(b"", timeout_s=1)
        assert time.monotonic() - started < 1 + rig.options.abort_timeout_s + 3
        await commits_fine(rig, rig.grant([1, 2]), [3, 4], [1, 2])
    finally:
        process.send_signal(signal.SIGCONT)
    again = await rig.open(regions[1])  # it was slow, not bad
    again.write(everything(list(range(1, 21))))
    await again.commit(b"", timeout_s=5)


async def test_abort_to_a_frozen_receiver_is_bounded(rig: Rig) -> None:
    process = await rig.spawn("receive", rig.kind)
    region = msgspec.json.decode(await _line(process), type=RemoteRegion)
    transfer = await rig.open(region)
    process.send_signal(signal.SIGSTOP)
    try:
        transfer.write(everything(list(range(1, 21))))
        started = time.monotonic()
        await transfer.abort("deadline")
        assert time.monotonic() - started < rig.options.abort_timeout_s + 3
    finally:
        process.send_signal(signal.SIGCONT)


async def test_a_receiver_that_restarts_at_its_old_address_is_reached_again(
    rig: Rig, tmp_path: os.PathLike[str]
) -> None:
    where: dict[str, object] = {"path": f"{tmp_path}/kv.sock"} if rig.kind in UNIX else {}
    first = await rig.add_receiver(rig.target, **where)
    region = first.grant(Lease(1, 1, [1], 5.0))
    transfer = await rig.open(region)
    await first.stop()
    with pytest.raises(PeerLost):
        await transfer.commit(b"", timeout_s=5)
    with pytest.raises(TransportUnavailable):
        await rig.sender.open(region, timeout_s=0.5)
    if rig.kind == "rdma":
        where = {"name": region.endpoint.address}
    if rig.kind == "tcp":
        where = {"port": int(region.endpoint.address.rpartition(":")[2])}
    second = await rig.add_receiver(rig.target, **where)
    assert second.endpoint == region.endpoint
    await commits_fine(rig, second.grant(Lease(1, 2, [1], 5.0)), [4], [1])


async def test_an_unreachable_endpoint_is_named_and_tried_again(rig: Rig) -> None:
    address = "@distserve-kv-nobody" if rig.kind in UNIX else {"tcp": "127.0.0.1:1", "rdma": "nobody"}[rig.kind]
    region = rig.grant([1])
    nowhere = msgspec.structs.replace(
        region, endpoint=Endpoint(kind=region.endpoint.kind, host=region.endpoint.host, address=address)
    )
    for _ in range(4):
        with pytest.raises(TransportUnavailable, match=address):
            await rig.sender.open(nowhere, timeout_s=2)
    await commits_fine(rig, region, [3], [1])


async def test_a_stopped_sender_fails_its_transfers_and_tells_the_receiver(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1]))
    transfer.write([Span(0, 1, (1,), (0,))])
    await until(lambda: rig.has_come(1, 0), what="the write")
    commit = asyncio.create_task(rig.sender.stop())
    assert isinstance(await rig.lost(1), PeerLost)
    await commit
    with pytest.raises(PeerLost):
        await transfer.commit(b"", timeout_s=5)
    with pytest.raises(TransportUnavailable, match="stopped"):
        await rig.open(rig.grant([2]))


async def test_a_stopped_receiver_ends_its_leases_quietly(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1]))
    transfer.write([Span(0, 1, (1,), (0,))])
    await until(lambda: rig.has_come(1, 0), what="the write")
    await rig.receiver.stop()
    await rig.receiver.stop()
    with pytest.raises(PeerLost):
        await transfer.commit(b"", timeout_s=5)
    assert not rig.losses


async def test_an_error_of_one_connection_is_raised_afresh_for_each_transfer(rig: Rig) -> None:
    proxy = rig.add_proxy()
    transfers = [await rig.open(proxy.redirect(rig.grant([i]))) for i in (1, 2)]
    for transfer in transfers:
        transfer.write(everything([3]))
    await rig.cut_for_good(proxy)
    errors: list[DistServeError] = []
    for transfer in transfers:
        with pytest.raises(PeerLost) as caught:
            await transfer.commit(b"", timeout_s=5)
        errors.append(caught.value)
    assert errors[0] is not errors[1]


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    async with asyncio.timeout(30 * SLOW):
        return await process.stdout.readline()
