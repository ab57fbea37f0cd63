"""The receiver against a peer made by hand, frame by frame: what no sender of ours would say."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import numpy as np
import pytest

from distserve.errors import LeaseRevoked, PeerLost, TransportError
from distserve.kv.checksum import block_sums
from distserve.transport import framing
from distserve.transport.base import Commit, Lease
from distserve.transport.framing import HEADER, FrameType, Hello, LeaseRef
from distserve.transport.shm import ShmReceiver
from distserve.transport.tcp import TcpReceiver
from tests.contracts.transport.conftest import FAST
from tests.contracts.transport.pools import SMALL, pool
from tests.waiting import until


class Peer:
    """Blocking calls on a thread of the executor; every wait has the socket's timeout."""

    def __init__(self, receiver: TcpReceiver) -> None:
        host, _, port = receiver.endpoint.address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), 10)

    async def send(self, *data: bytes) -> None:
        await asyncio.to_thread(self.sock.sendall, b"".join(data))

    async def read(self) -> tuple[FrameType, bytes]:
        return await asyncio.to_thread(self._read)

    def _read(self) -> tuple[FrameType, bytes]:
        kind, length = framing.parse_header(self._exactly(HEADER.size), 1 << 20)
        return kind, self._exactly(length)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.sock.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    async def greet(self) -> None:
        await self.send(framing.frame(FrameType.HELLO, hello()))
        kind, _ = await self.read()
        assert kind is FrameType.WELCOME


def hello(**changed: object) -> Hello:
    fields = {"kind": "tcp", "sender_id": "by hand", "traffic_class": "prefill", "layout": SMALL, "num_blocks": 8}
    return Hello(**(fields | changed))  # type: ignore[arg-type]


def write(lease_id: int, epoch: int, targets: list[int], payload: bytes, layers: tuple[int, int] = (0, 4)) -> bytes:
    return framing.write_frame(lease_id, epoch, *layers, [(target, 0, 1) for target in targets]) + payload


class Side:
    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.commits: list[Commit] = []
        self.losses: list[tuple[int, Exception]] = []

    async def start(self) -> Side:
        self.memory = self.stack.enter_context(pool(16))
        self.receiver = TcpReceiver(self.memory, options=FAST)
        await self.receiver.start(self.commits.append, lambda i, epoch, e: self.losses.append((i, e)))
        self.stack.push_async_callback(self.receiver.stop)
        return self

    async def peer(self, *, greeted: bool = True) -> Peer:
        peer = Peer(self.receiver)
        self.stack.callback(peer.sock.close)
        if greeted:
            await peer.greet()
        return peer


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    async with AsyncExitStack() as stack:
        yield await Side(stack).start()


BLOCK = bytes(range(256)) * 32  # one block of SMALL
SUM = block_sums(np.frombuffer(BLOCK, np.uint8).reshape(1, -1))


async def test_the_protocol_by_hand(side: Side) -> None:
    side.receiver.grant(Lease(1, 7, [3], 5.0))
    peer = await side.peer()
    await peer.send(framing.frame(FrameType.OPEN, LeaseRef(1, 7)), write(1, 7, [0], BLOCK))
    await peer.send(framing.commit_frame(1, 7, SUM, b"state"))
    kind, head = await peer.read()
    assert kind is FrameType.ACK
    assert framing.parse_body(kind, head, framing.Ack) == framing.Ack(1, 7, "commit", num_bytes=8192)
    assert side.memory.blocks[3].tobytes() == BLOCK
    assert side.commits[0].state == b"state"


async def test_a_second_commit_and_writes_after_it_change_nothing(side: Side) -> None:
    side.receiver.grant(Lease(1, 7, [3], 5.0))
    peer = await side.peer()
    commit = framing.commit_frame(1, 7, SUM, b"state")
    await peer.send(write(1, 7, [0], BLOCK), commit, write(1, 7, [0], bytes(8192)), commit)
    kinds = {(await peer.read())[0] for _ in range(2)}
    assert kinds == {FrameType.ACK, FrameType.LOST}
    assert len(side.commits) == 1
    assert side.memory.blocks[3].tobytes() == BLOCK


async def test_payload_of_a_dead_lease_is_drained_and_the_next_frame_is_understood(side: Side) -> None:
    side.receiver.grant(Lease(2, 1, [4], 5.0))
    peer = await side.peer()
    await peer.send(write(9, 1, [0, 1, 2], bytes(3 * 8192)), write(2, 1, [0], BLOCK))
    kind, head = await peer.read()
    assert kind is FrameType.LOST
    lost = framing.parse_body(kind, head, framing.Lost)
    assert isinstance(framing.error_of(lost.error), LeaseRevoked)
    await peer.send(framing.commit_frame(2, 1, SUM, b""))
    kind, _ = await peer.read()
    assert kind is FrameType.ACK
    assert side.memory.blocks[4].tobytes() == BLOCK
    assert not side.memory.blocks[:4].any()


@pytest.mark.parametrize(("targets", "layers"), [([0, 2], (0, 4)), ([0], (3, 5)), ([0], (2, 2))])
async def test_writes_outside_the_lease_fail_it_and_touch_nothing(
    side: Side, targets: list[int], layers: tuple[int, int]
) -> None:
    side.receiver.grant(Lease(1, 1, [3, 4], 5.0))
    side.receiver.grant(Lease(2, 1, [5], 5.0))
    peer = await side.peer()
    size = len(targets) * (layers[1] - layers[0]) * 2048
    await peer.send(write(1, 1, targets, b"\xff" * size, layers))
    kind, _ = await peer.read()
    assert kind is FrameType.LOST
    await until(lambda: [i for i, _ in side.losses] == [1], what="the loss")
    assert type(side.losses[0][1]) is TransportError
    await peer.send(write(2, 1, [0], BLOCK), framing.commit_frame(2, 1, SUM, b""))
    assert (await peer.read())[0] is FrameType.ACK
    assert not np.delete(side.memory.blocks, 5, axis=0).any()


@pytest.mark.parametrize("run", [(0, 0, 3), (2, 0, 1), (0, 0, 0), (1, 0, 2**32 - 1)])
async def test_runs_outside_the_lease_fail_it(side: Side, run: tuple[int, int, int]) -> None:
    side.receiver.grant(Lease(1, 1, [3, 4], 5.0))
    peer = await side.peer()
    await peer.send(framing.write_frame(1, 1, 0, 4, [run]))
    kind, _ = await peer.read() if run[2] == 0 else (None, None)  # of the others the payload is waited for
    await peer.send(framing.frame(FrameType.ABORT, LeaseRef(1, 1)) if run[2] == 0 else b"")
    if run[2]:
        peer.sock.close()
    await until(lambda: [i for i, _ in side.losses] == [1], what="the loss")
    assert kind in (None, FrameType.LOST)
    assert not side.memory.blocks.any()


async def test_one_run_over_blocks_that_are_no_neighbours_here(side: Side) -> None:
    side.receiver.grant(Lease(1, 1, [5, 6, 3, 9], 5.0))
    peer = await side.peer()
    blocks = np.random.default_rng(0).integers(0, 256, (4, 8192), np.uint8)
    frames = [framing.write_frame(1, 1, 0, 4, [(0, 0, 3), (3, 0, 1)]), blocks.tobytes()]
    await peer.send(*frames, framing.commit_frame(1, 1, block_sums(blocks), b""))
    assert (await peer.read())[0] is FrameType.ACK
    assert np.array_equal(side.memory.blocks[[5, 6, 3, 9]].reshape(4, -1), blocks)
    assert side.commits[0].num_bytes == blocks.nbytes


async def test_a_commit_of_the_wrong_number_of_blocks_fails(side: Side) -> None:
    side.receiver.grant(Lease(1, 1, [3], 5.0))
    peer = await side.peer()
    await peer.send(write(1, 1, [0], BLOCK), framing.commit_frame(1, 1, np.zeros(2, np.uint64), b""))
    kind, head = await peer.read()
    ack = framing.parse_body(kind, head, framing.Ack)
    assert ack.error is not None
    assert "has 1 blocks, its commit names 2" in ack.error[1]


async def test_revoke_returns_while_the_writer_sleeps_in_mid_frame(side: Side) -> None:
    side.receiver.grant(Lease(1, 1, [3, 4], 5.0))
    peer = await side.peer()
    frame = write(1, 1, [0, 1], BLOCK + BLOCK)
    await peer.send(frame[:9000])
    await until(lambda: bool(side.memory.blocks[3].any()), what="the first bytes")
    started = time.monotonic()
    await side.receiver.revoke(1)
    assert time.monotonic() - started < 1
    side.memory.blocks[3:5] = 0x77
    await peer.send(frame[9000:], framing.frame(FrameType.ABORT, LeaseRef(1, 1, "over")))
    kinds = [(await peer.read())[0] for _ in range(2)]
    assert kinds == [FrameType.LOST, FrameType.ACK]
    assert (side.memory.blocks[3:5] == 0x77).all()


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak this protocol"),
        (framing.frame(FrameType.OPEN, LeaseRef(1, 1)), "OPEN frame where one of Hello"),
        (framing.frame(FrameType.HELLO, hello(kind="shm")), "a shm sender on a tcp connection"),
    ],
)
async def test_a_stranger_is_told_why_and_cut(side: Side, first: bytes, said: str) -> None:
    peer = await side.peer(greeted=False)
    await peer.send(first)
    kind, head = await peer.read()
    assert kind is FrameType.REFUSED
    assert said in framing.parse_body(kind, head, framing.Refused).error[1]
    with pytest.raises((EOFError, ConnectionResetError)):
        await peer.read()


async def test_a_peer_that_says_nothing_is_cut_after_the_deadline(side: Side) -> None:
    peer = await side.peer(greeted=False)
    kind, head = await peer.read()
    assert kind is FrameType.REFUSED
    assert "sent nothing for 2" in framing.parse_body(kind, head, framing.Refused).error[1]


async def test_garbage_in_mid_stream_costs_that_connection_and_its_leases_only(side: Side) -> None:
    side.receiver.grant(Lease(1, 1, [3], 5.0))
    side.receiver.grant(Lease(2, 1, [4], 5.0))
    bad, good = await side.peer(), await side.peer()
    await bad.send(write(1, 1, [0], BLOCK), b"\x00" * 64)
    await until(lambda: [i for i, _ in side.losses] == [1], what="the loss")
    await good.send(write(2, 1, [0], BLOCK), framing.commit_frame(2, 1, SUM, b""))
    assert (await good.read())[0] is FrameType.ACK


async def test_a_peer_that_hangs_up_takes_only_its_own_leases(side: Side) -> None:
    for lease_id in (1, 2, 3):
        side.receiver.grant(Lease(lease_id, 1, [lease_id], 5.0))
    gone, stays = await side.peer(), await side.peer()
    await gone.send(framing.frame(FrameType.OPEN, LeaseRef(1, 1)))
    await stays.send(write(2, 1, [0], BLOCK))
    await until(lambda: bool(side.memory.blocks[2].any()), what="the write")
    gone.sock.close()
    await until(lambda: bool(side.losses), what="the loss")
    assert [(i, type(e)) for i, e in side.losses] == [(1, PeerLost)]
    assert side.receiver.idle_s(3) is not None  # granted, not yet opened: nobody's loss


async def test_shm_refuses_a_hello_without_a_descriptor() -> None:
    with pool(4) as memory:
        receiver = ShmReceiver(memory, options=FAST)
        await receiver.start(lambda _: None, lambda *_: None)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect("\0" + receiver.endpoint.address[1:])
            sock.sendall(framing.frame(FrameType.HELLO, hello(kind="shm")))
            answer = await asyncio.to_thread(sock.recv, 4096)
        assert b"passes 1 descriptor of its pool, 0 came" in answer
        await receiver.stop()
