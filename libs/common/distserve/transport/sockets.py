"""Socket I/O for threads: whole buffers, vectored, with deadlines. Works on blocking and non-blocking sockets alike,
since an event loop that watches a socket may switch it to non-blocking."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Sequence

from distserve.errors import PeerLost

_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)


def send_all(sock: socket.socket, buffers: Sequence[bytes | memoryview], timeout_s: float) -> None:
    """Every byte of the buffers, in order. Raises PeerLost if the peer takes none for timeout_s, OSError if it is
    gone. Byte buffers only (memoryviews of format B)."""
    index, offset = 0, 0
    poller: select.poll | None = None
    while index < len(buffers):
        batch: list[bytes | memoryview] = list(buffers[index : index + _IOV_MAX])
        if offset:
            batch[0] = memoryview(batch[0])[offset:]
        try:
            sent = sock.sendmsg(batch, (), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
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


def recv_scattered(
    sock: socket.socket,
    ranges: Sequence[memoryview],
    limit_bytes: int,
    receive: Callable[[list[memoryview]], int],
) -> bool:
    """Fills `ranges`, in order. `receive` makes one non-blocking receive into the buffers it is given, limit_bytes at
    most, and returns how many bytes came; or -1, when the memory may no longer be written: the rest is then received
    into nothing. True if every byte was placed. Raises EOFError, OSError."""
    missing = sum(len(view) for view in ranges)
    index, offset = 0, 0
    while index < len(ranges):
        batch: list[memoryview] = []
        room = limit_bytes
        while index + len(batch) < len(ranges) and len(batch) < _IOV_MAX and room > 0:
            batch.append(ranges[index + len(batch)][0 if batch else offset :][:room])
            room -= len(batch[-1])
        try:
            received = receive(batch)
        except BlockingIOError:
            wait_readable(sock)
            continue
        if received < 0:
            discard(sock, missing)
            return False
        if not received:
            raise EOFError
        missing -= received
        offset += received
        while index < len(ranges) and offset >= len(ranges[index]):
            offset -= len(ranges[index])
            index += 1
    return True


def discard(sock: socket.socket, size: int) -> None:
    """Receives `size` bytes into nothing, so that the frames after them can be read."""
    scratch = memoryview(bytearray(min(size, 1 << 20)))
    while size:
        part = min(size, len(scratch))
        recv_into(sock, scratch[:part])
        size -= part


def send_now(sock: socket.socket, data: bytes) -> bool:
    """One small frame without waiting. False if it did not go whole: the connection is then of no more use."""
    try:
        return sock.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) == len(data)
    except OSError:
        return False


def cut(sock: socket.socket) -> None:
    """Ends both directions at once; threads that wait on the socket wake up."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # never connected, or the peer was faster
