"""Files of blocks: vectored reads and writes at offsets, past the kernel's cache where it can be; errors typed."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from distserve.errors import DiskFailed, DiskFull, KVError
from distserve_kvstore.disk.format import ALIGN

_MAX_BUFFERS = 1024  # of one call, Linux' IOV_MAX
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def typed(path: Path, operation: str, wanted_bytes: int = 0) -> Iterator[None]:
    """OSErrors come out as DiskFull or DiskFailed."""
    try:
        yield
    except OSError as e:
        raise _translated(e, path, operation, wanted_bytes) from e


def _translated(e: OSError, path: Path, operation: str, wanted_bytes: int) -> KVError:
    what = os.strerror(e.errno) if e.errno else str(e)
    if e.errno in _FULL:
        return DiskFull(
            f"no room in {path.parent}: {what}",
            folder=str(path.parent),
            wanted_bytes=wanted_bytes,
            reason="file system",
        )
    return DiskFailed(f"can't {operation} {path}: {what}", path=str(path), operation=operation, errno=e.errno)


class BlockFile:
    """One open file. With `direct`, buffers, their lengths and offsets must be multiples of ALIGN."""

    def __init__(self, path: Path, *, create: bool = False, direct: bool = False) -> None:
        """Raises DiskFull, DiskFailed."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self.path = path
        self.direct = direct
        with typed(path, "open"):
            self._fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o640)

    def __del__(self) -> None:
        # Reads that began before the file was dropped still hold it; the last one lets go.
        with suppress(AttributeError, OSError):
            os.close(self._fd)

    @property
    def num_bytes(self) -> int:
        with typed(self.path, "look at"):
            return os.fstat(self._fd).st_size

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """All of it, one after the other. Raises DiskFull, DiskFailed: any part may have been written."""
        with typed(self.path, "write", sum(len(b) for b in buffers)):
            for some, at in _calls(buffers, offset):
                left = some
                while left:
                    written = os.pwritev(self._fd, left, at)
                    at += written
                    left = _after(left, written)

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read; less than the buffers hold where the file ends. Raises DiskFailed."""
        total = 0
        with typed(self.path, "read"):
            for some, at in _calls(buffers, offset):
                left = some
                while left:
                    got = os.preadv(self._fd, left, at)
                    if not got:
                        return total
                    total += got
                    at += got
                    left = _after(left, got)
                    if self.direct and at % ALIGN:
                        return total  # the file ends within what should have been read
        return total

    def allocate(self, num_bytes: int) -> None:
        """Space for so many bytes, which read as zeros, or DiskFull. Where the file system can't, nothing happens."""
        with typed(self.path, "allocate", num_bytes):
            try:
                os.posix_fallocate(self._fd, 0, num_bytes)
            except OSError as e:
                if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise

    def truncate(self, num_bytes: int) -> None:
        with typed(self.path, "truncate"):
            os.ftruncate(self._fd, num_bytes)

    def datasync(self) -> None:
        """What was written is on the device."""
        with typed(self.path, "sync"):
            os.fdatasync(self._fd)


def _calls(buffers: Sequence[memoryview], offset: int) -> Iterator[tuple[list[memoryview], int]]:
    for i in range(0, len(buffers), _MAX_BUFFERS):
        some = list(buffers[i : i + _MAX_BUFFERS])
        yield some, offset
        offset += sum(len(b) for b in some)


def _after(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of buffers behind the first num_bytes."""
    for i, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[i + 1 :]]
        num_bytes -= len(buffer)
    return []


def sync_folder(folder: Path) -> None:
    """Names that were made, changed and removed in it are on the device."""
    with typed(folder / ".", "sync"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def can_direct(folder: Path) -> bool:
    """Whether files in this folder can be written and read past the kernel's cache, by trying."""
    path = folder / "direct.tmp"
    buffer = memoryview(mmap.mmap(-1, ALIGN))
    with suppress(OSError):
        path.unlink()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o640)
    except OSError:
        return False
    try:
        return os.pwritev(fd, [buffer], 0) == ALIGN and os.preadv(fd, [buffer], 0) == ALIGN
    except OSError as e:
        return e.errno in _FULL  # it may well; there is no room to try
    finally:
        os.close(fd)
        with suppress(OSError):
            path.unlink()


def is_aligned(buffer: memoryview) -> bool:
    """Whether direct I/O takes it as it lies."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % ALIGN == 0 and len(buffer) % ALIGN == 0


class Scratch(threading.local):
    """Aligned memory of each thread, which is reused: a view is good until the thread's next take()."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """uint8 [num_bytes], of whatever."""
        if len(self._memory) < num_bytes:
            self._memory = memoryview(mmap.mmap(-1, max(num_bytes, 2 * len(self._memory))))
        return self._memory[:num_bytes]
