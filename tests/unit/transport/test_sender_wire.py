"""What a sender says, frame by frame, to a receiver made by hand."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from distserve.errors import PeerLost
from distserve.kv.checksum import block_sums
from distserve.messages import Endpoint, RemoteRegion
from distserve.transport import framing
from distserve.transport.framing import FrameReader, FrameType
from distserve.transport.outbound import OutboundTransfer
from distserve.transport.select import host_key
from distserve.transport.shm import ShmSender
from tests.contracts.transport.conftest import FAST, everything
from tests.contracts.transport.pools import SMALL, pool
from tests.waiting import until


class Listener:
    """Welcomes one sender and notes every frame that it sends."""

    def __init__(self) -> None:
        self.frames: list[tuple[FrameType, bytes]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")
        self._listener.listen()
        self._listener.settimeout(10)
        self.address = "@" + self._listener.getsockname()[1:].decode()
        self.peer: socket.socket | None = None
        self.reads = threading.Event()
        self.reads.set()

    async def run(self) -> None:
        await asyncio.to_thread(self._serve)

    def _serve(self) -> None:
        self.peer, _ = self._listener.accept()
        self.peer.settimeout(10)
        reader = FrameReader(1 << 20)
        while self.reads.wait(10) and (data := self.peer.recv(1 << 16)):
            for kind, head in reader.feed(data):
                self.frames.append((kind, head))
                if kind is FrameType.HELLO:
                    self.peer.sendall(framing.frame(FrameType.WELCOME, framing.Welcome(layout=SMALL)))

    def region(self, lease_id: int) -> RemoteRegion:
        endpoint = Endpoint(kind="shm", host=host_key(), address=self.address)
        return RemoteRegion(lease_id=lease_id, epoch=1, endpoint=endpoint, block_ids=[1, 2], layout=SMALL)

    def close(self) -> None:
        self._listener.close()
        if self.peer is not None:
            self.peer.close()


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    serving = asyncio.create_task(listener.run())
    yield listener
    await serving  # the test has stopped its sender: the stream has ended
    listener.close()


async def test_a_transfer_that_has_nothing_to_write_yet_opens_its_lease(listener: Listener) -> None:
    with pool(4) as memory:
        sender = ShmSender(memory, sender_id="p", options=FAST)
        transfer = await sender.open(listener.region(7), timeout_s=5)
        await until(lambda: len(listener.frames) == 2, what="the frame")
        kind, head = listener.frames[1]
        assert framing.parse_body(kind, head, framing.LeaseRef) == framing.LeaseRef(7, 1)
        assert transfer.failure is None
        await sender.stop()


async def test_one_that_writes_at_once_says_no_more_than_its_writes_and_its_commit(listener: Listener) -> None:
    with pool(4, seed=1) as memory:
        sender = ShmSender(memory, sender_id="p", options=FAST)
        transfers = [await sender.open(listener.region(7), timeout_s=5)]  # once connected, open() does not wait
        await until(lambda: len(listener.frames) == 2, what="the first OPEN")
        for lease_id in (8, 9):
            transfer = await sender.open(listener.region(lease_id), timeout_s=5)
            transfer.write(everything([2, 3]))
            transfers.append(transfer)
        commits = [asyncio.create_task(t.commit(b"s", timeout_s=5)) for t in transfers[1:]]
        await until(lambda: len(listener.frames) == 6, what="the frames")
        said = [kind for kind, _ in listener.frames[2:]]
        assert sorted(said) == [FrameType.WRITE] * 2 + [FrameType.COMMIT] * 2
        commit = framing.parse_commit(listener.frames[-1][1])
        assert (commit.lease_id, commit.state, len(commit.sums)) == (9, b"s", 2)
        assert commit.sums.all()
        await sender.stop()
        for task in commits:
            with pytest.raises(PeerLost):
                await task


async def test_what_a_full_socket_does_not_take_is_left_to_the_thread_in_order(listener: Listener) -> None:
    with pool(4, seed=1) as memory:
        sender = ShmSender(memory, sender_id="p", options=replace(FAST, peer_timeout_s=10))
        transfer = await sender.open(listener.region(7), timeout_s=5)
        await until(lambda: len(listener.frames) == 2, what="the OPEN")
        listener.reads.clear()
        for _ in range(1000):  # more than a socket holds
            transfer.write(everything([2, 3]))
        commit = asyncio.create_task(transfer.commit(b"s", timeout_s=10))
        await asyncio.sleep(0)
        listener.reads.set()
        await until(lambda: len(listener.frames) == 1003, what="the frames")
        assert [kind for kind, _ in listener.frames[2:]] == [FrameType.WRITE] * 1000 + [FrameType.COMMIT]
        sums = framing.parse_commit(listener.frames[-1][1]).sums
        assert np.array_equal(sums, block_sums(memory.blocks[2:4]) * np.uint64(1000))
        await sender.stop()
        with pytest.raises(PeerLost):
            await commit


async def test_the_blocks_of_a_write_that_a_full_socket_holds_up_are_free_once_it_is_given_up(
    listener: Listener,
) -> None:
    with pool(4, seed=1) as memory:
        sender = ShmSender(memory, sender_id="p", options=FAST)
        transfer = await sender.open(listener.region(7), timeout_s=5)
        await until(lambda: len(listener.frames) == 2, what="the OPEN")
        listener.reads.clear()
        for _ in range(1000):
            transfer.write(everything([2, 3]))
        async with asyncio.timeout(5):
            await transfer.abort("changed its mind")
        assert isinstance(transfer, OutboundTransfer)
        async with asyncio.timeout(5):
            await transfer.fence.shut()  # nobody is inside
        listener.reads.set()
        await sender.stop()
