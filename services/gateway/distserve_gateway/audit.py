"""telemetry.audit_file: a line of JSON for each second, written by a thread of its own.

    {"gateway":"gateway-1","at_unix_s":1764532800.0,"num_started":3,…}    the fields of status.Second

A disk that is full or slow holds up no token: lines wait, MAX_WAITING at most, and are counted when they are lost. Each
line is one write() in append mode, so several gateways may share a file, and one that was rotated away is opened anew.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from types import TracebackType
from typing import Self

import msgspec

from distserve.errors import ConfigError
from distserve.status import Second

log = logging.getLogger(__name__)

KEY = "telemetry.audit_file"
MAX_WAITING = 600
END_S = 2.0  # for what waits at the end

_MODE = 0o644


class AuditLine(Second, frozen=True):
    gateway: str = ""


class Audit:
    """`async with` it. Raises ConfigError if the file can't be opened; what goes wrong later is logged, once until it
    goes well again."""

    def __init__(self, path: str, gateway_id: str) -> None:
        self.num_lost = 0  # lines
        self._path = path
        self._gateway_id = gateway_id
        self._lines: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._problem = ""
        self._is_torn = False  # a line was cut short: the next begins on a new one
        self._fd: int | None = None
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)

    async def __aenter__(self) -> Self:
        try:
            self._fd = self._open()
        except OSError as e:
            raise ConfigError(
                f"{KEY} is {self._path!r}: {e.strerror or e}; name a file that can be written, or none",
                key=KEY,
                value=self._path,
                expected="a file that can be written, or empty",
            ) from e
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, END_S)
        if self._thread.is_alive():
            log.warning("%s %s: %d lines could not be written in time", KEY, self._path, len(self._lines))

    def write(self, second: Second) -> None:
        """Returns at once."""
        line = msgspec.json.encode(AuditLine(gateway=self._gateway_id, **msgspec.structs.asdict(second))) + b"\n"
        with self._changed:
            if len(self._lines) >= MAX_WAITING:
                self.num_lost += 1
                return
            self._lines.append(line)
            self._changed.notify()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    break
                line = self._lines.popleft()
            self._put(line)
        if self._fd is not None:
            os.close(self._fd)

    def _put(self, line: bytes) -> None:
        try:
            if self._fd is None or self._was_moved(self._fd):
                self._reopen()
            assert self._fd is not None
            data = b"\n" + line if self._is_torn else line
            written = os.write(self._fd, data)
            self._is_torn = written < len(data)
            if self._is_torn:
                raise OSError(f"{written} of {len(data)} bytes were written")
        except OSError as e:
            self.num_lost += 1
            if not self._problem:
                log.warning("%s %s: %s; serving goes on, these seconds are lost", KEY, self._path, e)
            self._problem = str(e)
            return
        if self._problem:
            self._problem = ""
            log.warning("%s %s can be written again, %d lines were lost", KEY, self._path, self.num_lost)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)

    def _reopen(self) -> None:
        old, self._fd = self._fd, None
        if old is not None:
            os.close(old)
        self._fd = self._open()

    def _was_moved(self, fd: int) -> bool:
        """Another file, or none, has its name now."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return True
        ours = os.fstat(fd)
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)
