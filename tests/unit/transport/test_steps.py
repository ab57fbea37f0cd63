"""Who runs the steps of a connection: the loop while they are short, a thread from BULK to IDLE."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from distserve.transport.steps import Step, Stepper, Steps
from tests.waiting import until


class Run:
    """One stepper over a socket, with how it ended."""

    def __init__(self, sock: socket.socket, steps: Steps[None]) -> None:
        self.closed_by = ""
        self.ended: list[BaseException | None] = []
        self.sock = sock
        self.stepper = Stepper(steps, sock, self._close, self.ended.append, "kv-steps")
        self.stepper.start()

    def _close(self) -> None:
        self.closed_by = threading.current_thread().name
        self.sock.close()

    async def end(self) -> BaseException | None:
        await until(lambda: bool(self.ended), what="the end")
        assert "kv-steps" not in {thread.name for thread in threading.enumerate()}
        return self.ended[0]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    right.setblocking(False)
    with left, right:
        yield left, right


def served(sock: socket.socket, done: list[tuple[bytes, str]]) -> Steps[None]:
    """Notes each byte and the thread that took it. b: BULK comes before it is dealt with; x: the end; !: an error."""
    while True:
        try:
            byte = sock.recv(1)
        except BlockingIOError:
            yield Step.IDLE
            continue
        if byte == b"b":
            yield Step.BULK
        if byte == b"!":
            raise ValueError("garbage")
        if byte in (b"x", b""):
            return
        yield Step.PIECE
        done.append((byte, threading.current_thread().name))


async def test_bulk_goes_to_a_thread_and_what_follows_a_pause_comes_back(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    left, right = sockets
    done: list[tuple[bytes, str]] = []
    run = Run(right, served(right, done))
    left.sendall(b"a")
    await until(lambda: len(done) == 1, what="the first byte")
    left.sendall(b"bc")
    await until(lambda: len(done) == 3, what="the bulk")
    await until(lambda: run.stepper.on_loop, what="the return")
    left.sendall(b"dx")
    assert await run.end() is None
    here = threading.current_thread().name
    assert done == [(b"a", here), (b"b", "kv-steps"), (b"c", "kv-steps"), (b"d", here)]
    assert run.closed_by == here


@pytest.mark.parametrize(("sent", "closed_by"), [(b"a!", "MainThread"), (b"b!", "kv-steps")])
async def test_an_error_ends_it_wherever_it_is_raised(
    sockets: tuple[socket.socket, socket.socket], sent: bytes, closed_by: str
) -> None:
    left, right = sockets
    run = Run(right, served(right, []))
    left.sendall(sent)
    assert isinstance(await run.end(), ValueError)
    assert run.closed_by == closed_by


async def test_calls_arrive_in_order_before_the_end_whoever_makes_them(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    left, right = sockets
    told: list[object] = []

    def tell(what: object) -> None:
        assert threading.current_thread() is threading.main_thread()
        told.append(what)

    def steps() -> Steps[None]:
        for i in range(100):
            if i == 20:
                yield Step.BULK
            if i == 60:
                yield Step.IDLE  # the thread gives it back
            run.stepper.call(tell, i)
            yield Step.PIECE
        run.stepper.call(tell, "last")

    run = Run(right, steps())
    left.sendall(b".")
    assert await run.end() is None
    assert told == [*range(100), "last"]


async def test_many_pieces_leave_the_loop_to_others(sockets: tuple[socket.socket, socket.socket]) -> None:
    left, right = sockets
    others = 0
    pieces = 0

    def steps() -> Steps[None]:
        nonlocal pieces
        while others < 5:  # never, if nobody else had a turn
            pieces += 1
            if pieces > 1_000_000:
                return
            yield Step.PIECE

    run = Run(right, steps())
    left.sendall(b".")
    while not run.ended:
        await asyncio.sleep(0)
        others += 1
    assert await run.end() is None
    assert others >= 5
    assert pieces <= 1_000_000
