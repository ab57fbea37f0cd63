"""A proxy between a sender and a receiver that holds, cuts or damages what goes through. For tcp and Unix sockets,
descriptors included."""

from __future__ import annotations

import os
import socket
import threading

import msgspec

from distserve.messages import Endpoint, RemoteRegion

UNIX = ("shm", "cuda_ipc")  # kinds whose frames go over Unix sockets


class Proxy:
    """Threads, so that it works while an event loop is busy. close() ends and joins them."""

    def __init__(self, target: Endpoint) -> None:
        self._target = target
        self._gate = threading.Event()
        self._gate.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self.forwarded = 0  # bytes from sender to receiver
        self.cut_after: int | None = None  # cut once so many bytes went from sender to receiver
        self.flip_at: int | None = None  # this byte of the stream is changed on its way
        self._listener = socket.socket(socket.AF_UNIX if target.kind in UNIX else socket.AF_INET)
        self._listener.bind("" if target.kind in UNIX else ("127.0.0.1", 0))  # "": the kernel picks an abstract name
        self._listener.listen()
        self._spawn(self._accept)

    def redirect(self, region: RemoteRegion) -> RemoteRegion:
        """The region, reached through this proxy."""
        name = self._listener.getsockname()
        address = "@" + name[1:].decode() if self._target.kind in UNIX else f"{name[0]}:{name[1]}"
        endpoint = Endpoint(kind=self._target.kind, host=self._target.host, address=address)
        return msgspec.structs.replace(region, endpoint=endpoint)

    def hold(self) -> None:
        """What the sender sends stays here until release()."""
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def cut(self) -> None:
        """Every connection, at once and in both directions."""
        with self._lock:
            for sock in self._sockets:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def close(self) -> None:
        self._closed = True
        self._gate.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()
        self._listener.close()
        for sock in self._sockets:
            sock.close()

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(self._listener.family)
            try:
                if self._target.kind in UNIX:
                    server.connect("\0" + self._target.address[1:])
                else:
                    host, _, port = self._target.address.rpartition(":")
                    server.connect((host, int(port)))
            except OSError:
                client.close()
                server.close()
                continue
            with self._lock:
                self._sockets += [client, server]
            if self._closed:
                self.cut()
            self._spawn(self._pump, client, server, True)
            self._spawn(self._pump, server, client, False)

    def _pump(self, source: socket.socket, target: socket.socket, upstream: bool) -> None:
        try:
            while True:
                fds: list[int] = []
                if self._target.kind in UNIX:
                    raw, fds, _, _ = socket.recv_fds(source, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
                else:
                    raw = source.recv(1 << 16)
                if not raw:
                    break
                data = bytearray(raw)
                if upstream:
                    self._gate.wait()
                    data = self._meddle(data)
                if fds:
                    socket.send_fds(target, [data[:1]], fds)
                    del data[:1]
                    for fd in fds:
                        os.close(fd)
                target.sendall(data)
                if upstream and self.cut_after is not None and self.forwarded >= self.cut_after:
                    self.cut()
        except OSError:
            pass
        for sock in (source, target):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _meddle(self, data: bytearray) -> bytearray:
        start, self.forwarded = self.forwarded, self.forwarded + len(data)
        if self.flip_at is not None and start <= self.flip_at < self.forwarded:
            data[self.flip_at - start] ^= 0x10
        if self.cut_after is not None and self.forwarded >= self.cut_after:
            del data[max(0, self.cut_after - start) :]
        return data
