"""Socket I/O for threads: whole buffers, vectored, with deadlines. The functions work on blocking and non-blocking
sockets alike, since an event loop that watches a socket may switch it to non-blocking; Incoming wants its socket
blocking and to itself."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from distserve.errors import PeerLost

Buffer: TypeAlias = "bytes | memoryview"  # a memoryview of format B

_AT_ONCE = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)


def send_all(sock: socket.socket, buffers: Sequence[Buffer], timeout_s: float) -> None:
    """Every byte of the buffers, in order. Raises PeerLost if the peer takes none for timeout_s, OSError if it is
    gone."""
    index, offset = 0, 0
    poller: select.poll | None = None
    while index < len(buffers):
        batch: list[Buffer] = list(buffers[index : index + _IOV_MAX])
        if offset:
            batch[0] = memoryview(batch[0])[offset:]
        try:
            sent = sock.sendmsg(batch, (), _AT_ONCE)
        except BlockingIOError:
            if poller is None:
                poller = select.poll()
                poller.register(sock, select.POLLOUT)
            if not poller.poll(timeout_s * 1000):
                raise PeerLost(f"the peer took no byte for {timeout_s} s", timeout_s=timeout_s) from None
            continue
        sent += offset
        while index < len(buffers) and sent >= len(buffers[index]):
            sent -= len(buffers[index])
            index += 1
        offset = sent


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
    """One peer's bytes, for the one thread that reads them: heads out of a buffer that each call to the kernel fills
    as far as it can, payload straight to where it belongs. The socket must be blocking and stay so."""

    def __init__(self, sock: socket.socket, ahead_bytes: int) -> None:
        """ahead_bytes: how much is read beyond what is asked for. Payload caught by it is copied once more."""
        self.timeout_s: float | None = None  # of silence, in take(); None: for ever
        self._sock = sock
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._ahead_bytes = ahead_bytes
        self._view = memoryview(bytearray(ahead_bytes))
        self._start = self._stop = 0  # what was read and not yet taken: view[start:stop]

    def take(self, size: int) -> memoryview:
        """The next `size` bytes, valid until the next call of anything here. Raises EOFError at the end of the
        stream, PeerLost after timeout_s of silence, OSError."""
        if self._stop - self._start < size:
            self._fill(size)
        start = self._start
        self._start = start + size
        return self._view[start : start + size]

    def scatter(
        self, ranges: Sequence[memoryview], limit_bytes: int, guarded: Callable[[Callable[[], int]], int]
    ) -> bool:
        """Fills `ranges`, in order. `guarded` is given one non-blocking receive of limit_bytes at most to make, and
        returns what it returned; or -1, if the memory may no longer be written: the rest is then received into
        nothing. True if every byte was placed. Raises EOFError, OSError."""
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
                self._poller.poll()
                continue
            if received < 0:
                self.discard(missing)
                return False
            missing -= received
            offset += received
            while index < len(ranges) and offset >= len(ranges[index]):
                offset -= len(ranges[index])
                index += 1
        return True

    def discard(self, size: int) -> None:
        """Takes `size` bytes into nothing, so that the frames after them can be read."""
        buffered = min(size, self._stop - self._start)
        self._start += buffered
        size -= buffered
        scratch = memoryview(bytearray(min(size, 1 << 20)))
        while size:
            size -= self._read(scratch[: min(size, len(scratch))])

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

    def _fill(self, size: int) -> None:
        """Reads until `size` bytes are in the buffer; it grows for a frame that does not fit."""
        pending = bytes(self._view[self._start : self._stop])
        if size > len(self._view) or len(self._view) > self._ahead_bytes:
            self._view = memoryview(bytearray(max(size, self._ahead_bytes)))
        self._view[: len(pending)] = pending
        self._start, self._stop = 0, len(pending)
        while self._stop < size:
            self._stop += self._read(self._view[self._stop :])

    def _read(self, view: memoryview) -> int:
        if self.timeout_s is not None and not self._poller.poll(self.timeout_s * 1000):
            raise PeerLost(f"the peer sent nothing for {self.timeout_s} s", timeout_s=self.timeout_s)
        received = self._sock.recv_into(view)
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
