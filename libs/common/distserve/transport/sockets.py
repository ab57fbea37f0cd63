"""Socket I/O: whole buffers, vectored, with deadlines for threads, in steps for those who must not wait. It works on
blocking and non-blocking sockets alike, since an event loop that watches a socket may switch it to non-blocking."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from distserve.errors import PeerLost
from distserve.transport.steps import Step, Steps

Buffer: TypeAlias = "bytes | memoryview"  # a memoryview of format B

_AT_ONCE = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
DISCARD_BYTES = 256 << 10  # at a time


def send_all(sock: socket.socket, buffers: Sequence[Buffer], timeout_s: float) -> None:
    """Every byte of the buffers, in order. Raises PeerLost if the peer takes none for timeout_s, OSError if it is
    gone."""
    rest = send_some(sock, buffers)
    if not rest:
        return
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    while rest:
        if not poller.poll(timeout_s * 1000):
            raise PeerLost(f"the peer took no byte for {timeout_s} s", timeout_s=timeout_s)
        rest = send_some(sock, rest)


def send_some(sock: socket.socket, buffers: Sequence[Buffer]) -> list[Buffer]:
    """As much of the buffers as goes without waiting; returns what is left. Raises OSError."""
    rest = list(buffers)
    while rest:
        try:
            sent = sock.sendmsg(rest[:_IOV_MAX], (), _AT_ONCE)
        except BlockingIOError:
            return rest
        index = 0
        while index < len(rest) and sent >= len(rest[index]):
            sent -= len(rest[index])
            index += 1
        del rest[:index]
        if sent:
            rest[0] = memoryview(rest[0])[sent:]
    return rest


def recv_exact(sock: socket.socket, size: int, timeout_s: float | None = None) -> bytearray:
    """Exactly `size` bytes; waits for ever if no timeout_s (of silence) is given. Raises EOFError at the end of the
    stream, PeerLost after the silence, OSError."""
    data = bytearray(size)
    recv_into(sock, memoryview(data), timeout_s)
    return data


def recv_into(sock: socket.socket, view: memoryview, timeout_s: float | None = None) -> None:
    """Fills `view`; as recv_exact."""
    done = 0
    while done < len(view):
        try:
            received = sock.recv_into(view[done:], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            wait_readable(sock, timeout_s)
            continue
        if not received:
            raise EOFError
        done += received


def wait_readable(sock: socket.socket, timeout_s: float | None = None) -> None:
    """Returns when there is something to read, an end or an error. Raises PeerLost after timeout_s of silence."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if not poller.poll(None if timeout_s is None else timeout_s * 1000):
        raise PeerLost(f"the peer sent nothing for {timeout_s} s", timeout_s=timeout_s)


class Incoming:
    """One peer's bytes, for the one who reads them at the time: heads out of a buffer that each call to the kernel
    fills as far as it can, payload straight to where it belongs. Never blocks: its generators say when to wait."""

    def __init__(self, sock: socket.socket, ahead_bytes: int) -> None:
        """ahead_bytes: how much is read beyond what is asked for. Payload caught by it is copied once more."""
        self._sock = sock
        self._ahead_bytes = ahead_bytes
        self._view = memoryview(bytearray(ahead_bytes))
        self._start = self._stop = 0  # what was read and not yet taken: view[start:stop]

    def has(self, size: int) -> bool:
        """Whether take(size) would not have to wait. Raises EOFError at the end of the stream, OSError."""
        return self._stop - self._start >= size or self._fill(size)

    def take(self, size: int) -> Steps[memoryview]:
        """The next `size` bytes, valid until the next call of anything here. Raises as has()."""
        while not self.has(size):
            yield Step.WAIT
        start = self._start
        self._start = start + size
        return self._view[start : start + size]

    def scatter(
        self, ranges: Sequence[memoryview], limit_bytes: int, guarded: Callable[[Callable[[], int]], int]
    ) -> Steps[bool]:
        """Fills `ranges`, in order. `guarded` is given one receive of limit_bytes at most to make, and returns what
        it returned; or -1, if the memory may no longer be written: the rest is then received into nothing. True if
        every byte was placed. Raises EOFError, OSError."""
        missing = sum(len(view) for view in ranges)
        index, offset = 0, 0
        while index < len(ranges):
            batch: list[memoryview] = []
            room = limit_bytes
            while index + len(batch) < len(ranges) and len(batch) < _IOV_MAX and room > 0:
                batch.append(ranges[index + len(batch)][0 if batch else offset :][:room])
                room -= len(batch[-1])
            try:
                received = guarded(partial(self._receive, batch, limit_bytes - room == missing))
            except BlockingIOError:
                yield Step.WAIT
                continue
            if received < 0:
                yield from self.discard(missing)
                return False
            missing -= received
            offset += received
            while index < len(ranges) and offset >= len(ranges[index]):
                offset -= len(ranges[index])
                index += 1
            yield Step.PIECE
        return True

    def discard(self, size: int) -> Steps[None]:
        """Takes `size` bytes into nothing, so that the frames after them can be read."""
        buffered = min(size, self._stop - self._start)
        self._start += buffered
        size -= buffered
        scratch = memoryview(bytearray(min(size, DISCARD_BYTES)))
        while size:
            received = self._read(scratch[: min(size, len(scratch))])
            size -= received
            yield Step.PIECE if received else Step.WAIT

    def _receive(self, batch: list[memoryview], last: bool) -> int:
        """One receive into the batch: out of the buffer, or of the socket, and if it is the last, on into the buffer.
        Returns the bytes that went into the batch."""
        if self._start < self._stop:
            first = batch[0]
            size = min(len(first), self._stop - self._start)
            first[:size] = self._view[self._start : self._start + size]
            self._start += size
            return size
        wanted = sum(len(view) for view in batch)
        if last and len(batch) < _IOV_MAX:
            batch.append(self._view)
        received, _, _, _ = self._sock.recvmsg_into(batch, 0, socket.MSG_DONTWAIT)
        if not received:
            raise EOFError
        self._start, self._stop = 0, max(0, received - wanted)
        return min(received, wanted)

    def _fill(self, size: int) -> bool:
        """Reads until `size` bytes are in the buffer, False if they have not all come yet; it grows for a frame that
        does not fit."""
        if self._start:
            pending = bytes(self._view[self._start : self._stop])
            self._view[: len(pending)] = pending
            self._start, self._stop = 0, len(pending)
        if size > len(self._view) or (not self._stop and len(self._view) > self._ahead_bytes):
            view = memoryview(bytearray(max(size, self._ahead_bytes)))
            view[: self._stop] = self._view[: self._stop]
            self._view = view
        while self._stop < size:
            received = self._read(self._view[self._stop :])
            if not received:
                return False
            self._stop += received
        return True

    def _read(self, view: memoryview) -> int:
        """0: nothing has come."""
        try:
            received = self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        if not received:
            raise EOFError
        return received


def send_now(sock: socket.socket, data: bytes) -> bool:
    """One small frame without waiting. False if it did not go whole: the connection is then of no more use."""
    try:
        return sock.send(data, _AT_ONCE) == len(data)
    except OSError:
        return False


def cut(sock: socket.socket) -> None:
    """Ends both directions at once; threads that wait on the socket wake up."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # never connected, or the peer was faster
