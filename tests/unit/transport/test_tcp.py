"""What only TCP has: classes in the traffic class octet, options of the socket, vectored partial I/O."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from distserve.errors import PeerLost, TransportUnavailable
from distserve.messages import Endpoint, RemoteRegion, TrafficClass
from distserve.transport.base import Lease
from distserve.transport.options import StreamOptions
from distserve.transport.sockets import Incoming, send_all, wait_readable
from distserve.transport.steps import Step, Steps
from distserve.transport.tcp import TcpReceiver, TcpSender
from tests.contracts.transport.conftest import FAST, everything
from tests.contracts.transport.pools import SMALL, descriptors, pool

T = TypeVar("T")


def ends_of(port: int) -> list[socket.socket]:
    """Copies of this process's connected sockets that have `port` at one end."""
    found = []
    for fd, link in descriptors():
        if not link.startswith("socket:"):
            continue
        sock = socket.socket(fileno=os.dup(int(fd)))
        try:
            names = [sock.getsockname(), sock.getpeername()] if sock.family == socket.AF_INET else []
        except OSError:
            names = []  # listening, not connected
        if any(name[1] == port for name in names):
            found.append(sock)
        else:
            sock.close()
    return found


@pytest.mark.parametrize(("traffic_class", "tos"), [("decode", 48 << 2), ("prefill", 34 << 2), ("background", 0)])
async def test_both_ends_carry_the_class_of_the_lease(traffic_class: TrafficClass, tos: int) -> None:
    with pool(4, seed=1) as source, pool(4) as target:
        receiver, sender = TcpReceiver(target, options=FAST), TcpSender(source, sender_id="p", options=FAST)
        await receiver.start(lambda _: None, lambda *_: None)
        region = receiver.grant(Lease(1, 1, [2], 5.0))
        transfer = await sender.open(region, timeout_s=5, traffic_class=traffic_class)
        ends = ends_of(int(region.endpoint.address.rpartition(":")[2]))
        try:
            assert len(ends) == 2
            for end in ends:
                assert end.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) & 0xFC == tos
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == FAST.peer_timeout_s * 1000
        finally:
            for end in ends:
                end.close()
        transfer.write(everything([3]))
        await transfer.commit(b"", timeout_s=5)
        await sender.stop()
        await receiver.stop()


async def test_classes_have_connections_of_their_own() -> None:
    with pool(8, seed=1) as source, pool(8) as target:
        receiver, sender = TcpReceiver(target, options=FAST), TcpSender(source, sender_id="p", options=FAST)
        await receiver.start(lambda _: None, lambda *_: None)
        for i, traffic_class in enumerate(("decode", "prefill", "decode", "background")):
            region = receiver.grant(Lease(i + 1, 1, [i + 1], 5.0))
            transfer = await sender.open(region, timeout_s=5, traffic_class=traffic_class)  # type: ignore[arg-type]
            transfer.write(everything([1]))
            await transfer.commit(b"", timeout_s=5)
        assert sum(t.name == "kv-send-tcp" for t in threading.enumerate()) == 3
        await sender.stop()
        await receiver.stop()


async def test_ipv6_and_an_advertised_name() -> None:
    with pool(4, seed=1) as source, pool(4) as target:
        receiver = TcpReceiver(target, host="::", advertise="::1", options=FAST)
        sender = TcpSender(source, sender_id="p", options=FAST)
        await receiver.start(lambda _: None, lambda *_: None)
        assert receiver.endpoint.address.startswith("[::1]:")
        transfer = await sender.open(receiver.grant(Lease(1, 1, [2], 5.0)), timeout_s=5)
        transfer.write(everything([3]))
        await transfer.commit(b"", timeout_s=5)
        await sender.stop()
        await receiver.stop()


async def test_a_port_in_use_and_a_bad_address_are_named() -> None:
    with pool(4) as memory:
        first = TcpReceiver(memory)
        with pytest.raises(TransportUnavailable, match="no port before start"):
            _ = first.endpoint
        await first.start(lambda _: None, lambda *_: None)
        port = int(first.endpoint.address.rpartition(":")[2])
        with pytest.raises(TransportUnavailable, match=f"cannot listen on 127.0.0.1:{port}"):
            await TcpReceiver(memory, port=port).start(lambda _: None, lambda *_: None)
        await first.stop()
        sender = TcpSender(memory, sender_id="p", options=FAST)
        endpoint = Endpoint(kind="tcp", host="h", address="nonsense")
        region = RemoteRegion(lease_id=1, epoch=1, endpoint=endpoint, block_ids=[1], layout=SMALL)
        with pytest.raises(TransportUnavailable, match="'nonsense' is no tcp address"):
            await sender.open(region, timeout_s=5)
        await sender.stop()


def finish(steps: Steps[T], sock: socket.socket) -> T:
    """Runs the steps to their end, waiting where they say so."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        if step is Step.WAIT:
            wait_readable(sock, 10)


def test_vectored_io_survives_partial_sends_and_more_buffers_than_one_call_takes() -> None:
    rng = random.Random(4)
    parts = [rng.randbytes(rng.choice([1, 7, 100, 3000])) for _ in range(5000)]
    left, right = socket.socketpair()
    with left, right:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        room = bytearray(sum(map(len, parts)))
        views, start = [], 0
        while start < len(room):
            stop = min(len(room), start + rng.choice([1, 50, 2000]))
            views.append(memoryview(room)[start:stop])
            start = stop
        thread = threading.Thread(target=send_all, args=(left, [b"head", *parts], 10.0))
        thread.start()
        incoming = Incoming(right, 100)
        head = bytes(finish(incoming.take(4), right))  # reads on into the payload
        tail = views.pop()  # what follows the payload, partly read with it
        assert finish(incoming.scatter(views, 5000, lambda receive: receive()), right)
        tail[:] = finish(incoming.take(len(tail)), right)
        thread.join(10)
    assert head == b"head"
    assert bytes(room) == b"".join(parts)


def test_a_payload_that_may_no_longer_be_placed_is_skipped_to_the_next_frame() -> None:
    left, right = socket.socketpair()
    with left, right:
        incoming, room = Incoming(right, 16), bytearray(1 << 20)
        thread = threading.Thread(target=send_all, args=(left, [b"head", b"x" * len(room), b"next"], 10.0))
        thread.start()
        assert finish(incoming.take(4), right) == b"head"
        calls = 0

        def guarded(receive: Callable[[], int]) -> int:
            nonlocal calls
            calls += 1
            return receive() if calls <= 2 else -1

        assert not finish(incoming.scatter([memoryview(room)], 5000, guarded), right)
        assert finish(incoming.take(4), right) == b"next"
        thread.join(10)
    assert 0 < room.count(b"x") <= 12 + 5000  # what was read ahead, and one receive


def test_a_frame_larger_than_what_is_read_ahead_is_taken_whole() -> None:
    left, right = socket.socketpair()
    with left, right:
        incoming = Incoming(right, 64)
        body = random.Random(1).randbytes(1000)
        left.sendall(b"1234" + body + b"5678")
        assert finish(incoming.take(4), right) == b"1234"
        assert finish(incoming.take(1000), right) == body
        assert finish(incoming.take(4), right) == b"5678"
        assert next(incoming.take(1)) is Step.WAIT  # nothing blocks
        left.close()
        with pytest.raises(EOFError):
            next(incoming.take(1))


def test_a_peer_that_takes_nothing_is_lost_after_the_timeout() -> None:
    left, right = socket.socketpair()
    with left, right, pytest.raises(PeerLost, match=r"took no byte for 0\.2 s"):
        send_all(left, [bytes(1 << 22)], 0.2)
    assert StreamOptions().peer_timeout_s == 5
