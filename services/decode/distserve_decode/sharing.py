"""How KV comes to a decode worker's pool and leaves it: from prefill workers, and to and from the store and others who
want what the pool holds."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from distserve.bus.base import Bus, Watch
from distserve.config import Config
from distserve.errors import ConfigError
from distserve.transport.base import Commit, OnLost, PoolMemory, Sender
from distserve.worker.boot import EngineParts
from distserve.worker.data_plane import DataPlane, plan, senders
from distserve.worker.store.sharing import Sharing, share

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_sharing(
    config: Config,
    worker_id: str,
    bus: Bus,
    watch: Watch,
    parts: EngineParts,
    *,
    on_commit: Callable[[Commit], None],
    on_lost: OnLost,
    on_freed: Callable[[], None],
) -> AsyncIterator[Sharing]:
    """on_commit, on_lost: of hand-overs. on_freed: blocks that were lent to the store are back."""
    plane = _plane(config, parts.memory)
    keeps = config.kv.prefix_cache and bool(plane.kinds)  # there is something to share, and a way to get it across
    if not keeps:
        config = msgspec.structs.replace(config, kvstore=msgspec.structs.replace(config.kvstore, use=False))
    async with AsyncExitStack() as stack:
        kv_senders: dict[str, Sender] = {}
        if keeps:
            # On a thread: registering a large pool with a device, which pins every page of it, takes seconds.
            kv_senders = await asyncio.to_thread(senders, config, plane, parts.memory, worker_id, bus)
            for sender in kv_senders.values():
                stack.push_async_callback(sender.stop)
        yield await stack.enter_async_context(
            share(
                config,
                worker_id,
                bus,
                watch,
                parts,
                plane,
                kv_senders,
                receives=bool(plane.kinds),
                on_commit=on_commit,
                on_lost=on_lost,
                on_freed=on_freed,
            )
        )


def _plane(config: Config, memory: PoolMemory) -> DataPlane:
    """A colocated worker needs it for the store alone, and does without where nothing reaches its pool."""
    nothing = DataPlane([], "auto", may_fall_back=False)
    if not config.decode.colocated:
        return plan(config, memory)
    if not (config.kvstore.use and config.kv.prefix_cache):
        return nothing
    try:
        return plan(config, memory)
    except ConfigError as e:
        log.warning("this colocated worker has no part in the store: %s", e)
        return nothing
