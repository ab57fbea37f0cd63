"""Memory for blocks that other processes can map."""

from __future__ import annotations

import fcntl
import mmap
import os

from distserve.errors import ConfigError


def map_memory(num_bytes: int, *, what: str, key: str) -> tuple[int | None, mmap.mmap]:
    """num_bytes of zeros, mapped shared, and the descriptor that others can map them by, sealed against resizing; None
    where the system has no memfd. The descriptor is the caller's to close; the memory goes with its last view.

    what: whose memory it is; key: what makes it smaller. Raises ConfigError, which names both, if it can't be had.
    """
    try:
        if not hasattr(os, "memfd_create"):
            return None, mmap.mmap(-1, num_bytes)
        fd = os.memfd_create("distserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            # A peer that shrank the file would turn our next access into SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return fd, mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        except BaseException:
            os.close(fd)
            raise
    except (OSError, ValueError, OverflowError) as e:
        raise ConfigError(
            f"can't map {num_bytes} bytes for {what}: {e}; set {key} to less",
            key=key,
            value=num_bytes,
            expected="what fits in memory",
        ) from e
