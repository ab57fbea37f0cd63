"""Connections to a server: a request is written, what comes is stamped, nothing is taken apart meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from distserve.api_keys import is_sendable
from distserve.bench.errors import BadOption
from distserve.bench.wire import BadAnswer, Reading


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `prefix`: what every path begins with, e.g. "" or "/proxy"."""

    url: str
    host: str
    port: int
    prefix: str
    secure: bool

    @property
    def header(self) -> str:
        """Of `Host:`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"


def parse_url(option: str, text: str) -> Address:
    """`http://HOST:PORT`, with or without `/v1` behind it. Raises BadOption, which repeats no password."""
    expected = "it is http://HOST:PORT or https://HOST, e.g. http://127.0.0.1:8000"
    shown = f"…@{text.rpartition('@')[2]}" if "@" in text else text  # before it may be a password
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as e:
        raise BadOption(option, shown, f"{e}; {expected}" if shown == text else expected) from None
    if "@" in parts.netloc:
        raise BadOption(option, shown, f"{expected}, without user and password: keys go by --api-key or --header")
    sent = parts.netloc + parts.path
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise BadOption(option, shown, expected)
    if not is_sendable(sent) or " " in sent:
        raise BadOption(option, shown, f"{expected}; other characters are written %XX")
    secure = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Address(text.rstrip("/"), parts.hostname, port or (443 if secure else 80), prefix, secure)


@dataclass(slots=True)
class Exchange:
    """One request and what came. `sent_s`, `done_s`: on the clock of perf_counter; `sent_s` is None if it never was.
    `error`: why there is no whole answer, as (kind, text); None if there is one, whatever its status."""

    sent_s: float | None
    done_s: float
    reading: Reading
    error: tuple[str, str] | None = None


class Pool:
    """Connections to one server. One that served an answer serves the next, unless `fresh`."""

    def __init__(self, address: Address, *, fresh: bool = False) -> None:
        self.address = address
        self.num_opened = 0
        self._fresh = fresh
        self._idle: list[_Connection] = []
        self._ssl = ssl.create_default_context() if address.secure else None

    async def ask(self, data: bytes, deadline_s: float) -> Exchange:
        """Never raises for what the server or the network does; after `deadline_s` it is given up."""
        reading = Reading()
        connection: _Connection | None = None
        error: tuple[str, str] | None = None
        sent_s: float | None = None
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    connection, is_used = await self._connection()
                    sent_s = time.perf_counter()
                    try:
                        await connection.ask(data, reading)
                        break
                    except (ConnectionError, BadAnswer):
                        if not is_used or reading.begun:  # else it was closed while it waited: try a new one
                            raise
                        reading = Reading()
        except TimeoutError:
            error = "deadline", f"no whole answer within {deadline_s:g} s"
        except ConnectionRefusedError as e:
            error = "connection refused", str(e)
        except BadAnswer as e:
            error = ("cut off" if reading.status else "bad answer"), str(e)
        except ssl.SSLError as e:
            error = "TLS", str(e)
        except socket.gaierror as e:
            error = "unknown host", f"{self.address.host}: {e.strerror}"
        except OSError as e:
            error = "connection lost", str(e) or type(e).__name__
        finally:
            if connection is not None:
                if error is None and reading.keeps_open and not self._fresh and connection.is_open:
                    self._idle.append(connection)
                else:
                    connection.abort()
        return Exchange(sent_s, time.perf_counter(), reading, error)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def _connection(self) -> tuple[_Connection, bool]:
        """(connection, whether it served before). Raises OSError."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection, True
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, self.address.host, self.address.port, ssl=self._ssl)
        self.num_opened += 1
        return made, False


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._reading: Reading | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def ask(self, data: bytes, reading: Reading) -> None:
        """Returns when the answer is whole. Raises BadAnswer, OSError."""
        assert self._transport is not None
        self._reading = reading
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            await self._waiter
        finally:
            self._reading = self._waiter = None

    def abort(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True  # uvloop's are of no such class
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._reading is None:  # bytes that nobody asked for
            self.abort()
            return
        try:
            if self._reading.feed(now, data):
                self._finish(None)
        except BadAnswer as e:
            self._finish(e)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._reading is None:
            return
        if exc is None:
            try:
                self._reading.end()
            except BadAnswer as e:
                exc = e
        self._finish(exc)

    def _finish(self, exc: Exception | None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if exc is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(exc)
