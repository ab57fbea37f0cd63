"""Which records are dead, for after a restart: their serials, appended to one file."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from xxhash import xxh3_64_intdigest

from distserve.errors import DiskFull
from distserve_kvstore.disk.files import sync_folder, typed

NAME = "dead.log"
_ENTRY = struct.Struct("<QQ")  # serial, xxh3 of it
_SEED = 0x44534B5644454144  # "DSKVDEAD", format version 1


def _entries(serials: Iterable[int]) -> bytes:
    return b"".join(_ENTRY.pack(s, xxh3_64_intdigest(s.to_bytes(8, "little"), _SEED)) for s in serials)


def read_serials(folder: Path) -> tuple[set[int], int]:
    """Serials of the dead, and how many entries can't be read (the last one may be cut off: it counts as unread only
    if it is whole and wrong). Raises DiskFailed."""
    path = folder / NAME
    with typed(path, "read"):
        raw = path.read_bytes() if path.exists() else b""
    serials, num_wrong = set(), 0
    for serial, found in _ENTRY.iter_unpack(raw[: len(raw) // _ENTRY.size * _ENTRY.size]):
        if found == xxh3_64_intdigest(serial.to_bytes(8, "little"), _SEED):
            serials.add(serial)
        else:
            num_wrong += 1
    return serials, num_wrong


class Journal:
    """Safe from any thread. What can't be written is kept and written with the next, so that note() never fails."""

    def __init__(self, folder: Path, serials: Callable[[], Iterable[int]]) -> None:
        """Begins a new file with `serials` (rewrite()), or goes on with the old one if the disk is full. Raises
        DiskFull, DiskFailed."""
        self._folder = folder
        self._path = folder / NAME
        self._lock = threading.Lock()
        self._fd = -1
        self._num = 0
        self._end = 0
        self._pending: list[int] = []
        try:
            self.rewrite(serials)
        except DiskFull:
            self._go_on()  # nothing new can be written either; what is there says more than enough

    def __len__(self) -> int:
        return self._num

    def note(self, serials: Sequence[int]) -> None:
        """Dead from now on; after a crash of the process too, if the file could be written."""
        with self._lock:
            self._pending += serials
            try:
                self._write()
            except OSError:
                pass  # kept: sync() says so to whom it matters

    def sync(self) -> None:
        """All that was noted is on the device. Raises DiskFull, DiskFailed."""
        with self._lock, typed(self._path, "write"):
            self._write()
            os.fdatasync(self._fd)

    def rewrite(self, serials: Callable[[], Iterable[int]]) -> None:
        """Only these from now on, which must be all that are still needed. They are asked for when nothing can be noted
        any more that they don't contain. Raises DiskFull, DiskFailed: the old ones stay."""
        fresh = self._path.with_suffix(".tmp")
        with self._lock, typed(self._path, "write"):
            raw = _entries(serials())
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
            try:
                _write_all(fd, raw, 0)
                os.fdatasync(fd)
                fresh.rename(self._path)
            except BaseException:
                os.close(fd)
                raise
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._end, self._num = fd, len(raw), len(raw) // _ENTRY.size
        sync_folder(self._folder)

    def _go_on(self) -> None:
        with typed(self._path, "open"):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            self._num = os.fstat(self._fd).st_size // _ENTRY.size
        self._end = self._num * _ENTRY.size

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _write(self) -> None:
        if not self._pending:
            return
        raw = _entries(self._pending)
        _write_all(self._fd, raw, self._end)  # at the same offset again, if it failed half-way
        self._end += len(raw)
        self._num += len(self._pending)
        self._pending = []


def _write_all(fd: int, raw: bytes, offset: int) -> None:
    left = memoryview(raw)
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written
