"""What only shared memory has: maps, seals, socket names."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from distserve.errors import TransportError, TransportUnavailable
from distserve.messages import Endpoint, RemoteRegion
from distserve.transport import framing, unix_sockets
from distserve.transport.base import Lease, PoolMemory
from distserve.transport.framing import FrameType, Hello
from distserve.transport.shm import ShmReceiver, ShmSender
from tests.contracts.transport.conftest import FAST, everything
from tests.contracts.transport.pools import SMALL, pool
from tests.waiting import until


async def open_error(sender_memory: PoolMemory) -> Exception:
    """What a sender with this pool meets when it opens a lease."""
    with pool(4) as memory:
        receiver, sender = ShmReceiver(memory, options=FAST), ShmSender(sender_memory, sender_id="p", options=FAST)
        await receiver.start(lambda _: None, lambda *_: None)
        try:
            with pytest.raises(TransportUnavailable) as caught:
                await sender.open(receiver.grant(Lease(1, 1, [1], 5.0)), timeout_s=5)
        finally:
            await sender.stop()
            await receiver.stop()
        return caught.value


async def test_a_pool_that_could_shrink_is_refused() -> None:
    with pool(4) as memory:
        fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4 * 8192)
        error = await open_error(PoolMemory(SMALL, memory.blocks, fd))
        os.close(fd)
    assert "not sealed against shrinking" in str(error)


async def test_a_pool_smaller_than_it_says_is_refused() -> None:
    with pool(4) as memory, pool(3) as smaller:
        error = await open_error(PoolMemory(SMALL, memory.blocks, smaller.fd))
    assert "24576 bytes, its HELLO says 32768" in str(error)


async def test_a_descriptor_of_no_shared_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4 * 8192))
    fd = os.open(tmp_path / "file", os.O_RDWR)
    with pool(4) as memory:
        error = await open_error(PoolMemory(SMALL, memory.blocks, fd))
    os.close(fd)
    assert isinstance(error, TransportError)
    assert "cannot map" in str(error) or "not sealed" in str(error)


async def test_a_process_of_another_user_is_told_why_it_may_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransportUnavailable, so that another transport is taken; a connection that is merely cut would be PeerLost."""
    monkeypatch.setattr(unix_sockets, "user_of", lambda sock: 4242 if sock.getsockname() else os.geteuid())
    with pool(4) as memory:
        for _ in range(20):  # it is told however the two sides' threads run
            error = await open_error(memory)
            assert f"refuses: a process of user 4242 may not share KV with one of user {os.geteuid()}" in str(error)


async def test_a_pool_is_not_passed_to_a_listener_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Abstract names are free for anybody once their owner is gone."""
    monkeypatch.setattr(unix_sockets, "user_of", lambda sock: os.geteuid() if sock.getsockname() else 4242)
    with pool(4) as memory:
        error = await open_error(memory)
        assert f"a process of user 4242 may not share KV with one of user {os.geteuid()}" in str(error)


async def test_another_host_is_refused_before_connecting() -> None:
    with pool(4) as memory:
        sender = ShmSender(memory, sender_id="p", options=FAST)
        endpoint = Endpoint(kind="shm", host="another boot", address="@kv")
        region = RemoteRegion(lease_id=1, epoch=1, endpoint=endpoint, block_ids=[1], layout=SMALL)
        with pytest.raises(TransportUnavailable, match="another host"):
            await sender.open(region, timeout_s=5)
        await sender.stop()


async def test_a_socket_file_is_removed_at_stop_and_a_stale_one_at_start(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a killed process leaves it: nobody listens
    with pool(4, seed=1) as source, pool(4) as target:
        receiver, sender = ShmReceiver(target, path=str(path), options=FAST), ShmSender(source, sender_id="p")
        await receiver.start(lambda _: None, lambda *_: None)
        transfer = await sender.open(receiver.grant(Lease(1, 1, [2], 5.0)), timeout_s=5)
        transfer.write(everything([3]))
        await transfer.commit(b"", timeout_s=5)
        rival = ShmReceiver(target, path=str(path), options=FAST)
        with pytest.raises(TransportUnavailable, match="in use"):
            await rival.start(lambda _: None, lambda *_: None)
        await sender.stop()
        await receiver.stop()
    assert not path.exists()


async def test_an_abstract_socket_leaves_no_file() -> None:
    before = set(os.listdir("/dev/shm")) | set(os.listdir("/tmp"))
    with pool(4) as memory:
        receiver = ShmReceiver(memory)
        await receiver.start(lambda _: None, lambda *_: None)
        assert receiver.endpoint.address.startswith("@")
        assert receiver.endpoint.address not in before
        assert not any("distserve-kv" in name for name in [*os.listdir("/dev/shm"), *os.listdir("/tmp")])
        await receiver.stop()


async def test_sources_outside_the_senders_pool_fail_the_lease_only() -> None:
    losses: list[int] = []
    with pool(4) as memory, pool(4, seed=1) as source, socket.socket(socket.AF_UNIX) as peer:
        receiver = ShmReceiver(memory, options=FAST)
        await receiver.start(lambda _: None, lambda lease_id, epoch, _: losses.append(lease_id))
        for lease_id in (1, 2):
            receiver.grant(Lease(lease_id, 1, [lease_id], 5.0))
        hello = Hello(kind="shm", sender_id="by hand", traffic_class="decode", layout=SMALL, num_blocks=4)
        peer.settimeout(10)
        peer.connect("\0" + receiver.endpoint.address[1:])
        assert source.fd is not None
        socket.send_fds(peer, [framing.frame(FrameType.HELLO, hello)], [source.fd])
        for lease_id, block in ((1, 4), (2, 3)):
            peer.sendall(framing.write_frame(lease_id, 1, 0, 4, [(0, block, 1)]))
        await until(lambda: losses == [1], what="the loss")
        await until(lambda: np.array_equal(memory.blocks[2], source.blocks[3]), what="the other lease's bytes")
        assert not memory.blocks[1].any()
        await receiver.stop()
