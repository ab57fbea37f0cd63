"""Opening the disk tier: on a thread that may never come back, and that nobody has to wait for."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from distserve.errors import DiskFailed
from distserve.messages import KVLayout
from distserve_kvstore.disk import DiskOptions, DiskTier, RecoveredRun
from distserve_kvstore.io_threads import on_daemon

OPEN_S = 120.0  # reading what a crash has left of the largest folder takes less


async def open_disk(
    folder: Path, layout: KVLayout, options: DiskOptions, *, timeout_s: float = OPEN_S
) -> tuple[DiskTier, list[RecoveredRun]]:
    """As DiskTier.open(). Raises DiskFailed after timeout_s. Whoever stops waiting, for that or by being cancelled,
    leaves nothing open: the folder is given back as soon as the disk answers."""
    opening = _Opening(folder, layout, options)
    try:
        async with asyncio.timeout(timeout_s):
            return await on_daemon(opening.run)
    except TimeoutError:
        opening.abandon()
        raise DiskFailed(
            f"{folder} was not opened within {timeout_s:g} s", path=str(folder), operation="open", errno=None
        ) from None
    except asyncio.CancelledError:
        opening.abandon()
        raise


class _Opening:
    """Whoever comes second, its thread or who abandons it, closes the tier."""

    def __init__(self, folder: Path, layout: KVLayout, options: DiskOptions) -> None:
        self._folder = folder
        self._layout = layout
        self._options = options
        self._lock = threading.Lock()
        self._tier: DiskTier | None = None
        self._is_abandoned = False

    def run(self) -> tuple[DiskTier, list[RecoveredRun]]:
        tier, runs = DiskTier.open(self._folder, self._layout, self._options)
        with self._lock:
            self._tier = tier
            abandoned = self._is_abandoned
        if abandoned:
            tier.close()
        return tier, runs

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            tier = self._tier
        if tier is not None:
            threading.Thread(target=tier.close, name="close an abandoned disk tier", daemon=True).start()
