"""Which layout a node serves: that of its model's workers, else that of the blocks in its folder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from distserve.bus.base import Watch
from distserve.bus.subjects import slug
from distserve.config import Config
from distserve.machine import cache_folder
from distserve.messages import KVLayout, WorkerInfo
from distserve_kvstore.disk import DiskTier
from distserve_kvstore.io_threads import on_daemon

log = logging.getLogger(__name__)


def folder_of(config: Config) -> Path:
    """Where the node's blocks lie on disk. A node that is started again finds them if its id, or else its model, is
    the same."""
    if config.kvstore.folder:
        return Path(config.kvstore.folder).expanduser()
    return cache_folder() / "kvstore" / slug(config.kvstore.id or config.model.served_name)


def of_workers(snapshot: Mapping[str, WorkerInfo], model: str) -> list[KVLayout]:
    """Of the model's workers that are there, each once."""
    found: list[KVLayout] = []
    for info in snapshot.values():
        if info.role in ("prefill", "decode") and info.model == model and info.layout not in (None, *found):
            assert info.layout is not None
            found.append(info.layout)
    return found


async def learn(config: Config, watch: Watch) -> KVLayout:
    """Waits for the first worker of the model if nothing else says it. Has no deadline: that is a node that waits for
    its model."""
    model = config.model.served_name
    changed = asyncio.Event()
    watch.on_event(lambda event: changed.set())
    if not (layouts := of_workers(watch.snapshot, model)) and config.kvstore.disk_bytes:
        folder = folder_of(config)
        if (layout := await on_daemon(lambda: DiskTier.layout_of(folder))) is not None:
            log.info("layout of %s: %s layers of %s", folder, layout.num_layers, layout.dtype)
            return layout
    if not layouts:
        log.info("waiting for the first worker of %s, which says what a block is", model)
    while not (layouts := of_workers(watch.snapshot, model)):
        changed.clear()
        await changed.wait()
    return layouts[0]


async def replaced(layout: KVLayout, config: Config, watch: Watch) -> None:
    """Returns when the model's workers all have another layout than this: it was loaded anew in another way."""
    changed = asyncio.Event()
    watch.on_event(lambda event: changed.set())
    while True:
        layouts = of_workers(watch.snapshot, config.model.served_name)
        if layouts and layout not in layouts:
            return
        changed.clear()
        await changed.wait()
