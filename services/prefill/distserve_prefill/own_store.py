"""A prefill worker's part in the store, and the receivers that take what it fetches."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from distserve.bus.base import Bus, Watch
from distserve.config import Config
from distserve.kv.lease import LeaseTable, first_epoch
from distserve.transport.base import Receiver, Sender
from distserve.worker.boot import EngineParts
from distserve.worker.data_plane import DataPlane, receivers
from distserve.worker.store.arrivals import Arrivals
from distserve.worker.store.opening import Store, open_store


@asynccontextmanager
async def prefix_store(
    config: Config,
    worker_id: str,
    bus: Bus,
    watch: Watch,
    parts: EngineParts,
    plane: DataPlane,
    kv_senders: dict[str, Sender],
    on_freed: Callable[[], None],
) -> AsyncIterator[Store]:
    """Without kvstore.use or kv.prefix_cache there is nothing to fetch, and no receiver."""
    leases, arrivals = LeaseTable(first_epoch()), Arrivals()
    async with AsyncExitStack() as stack:
        kv_receivers: dict[str, Receiver] = {}
        if config.kvstore.use and config.kv.prefix_cache:
            kv_receivers = await receivers(
                # transport.port is decode's, which may run beside it under the same configuration.
                msgspec.structs.replace(config, transport=msgspec.structs.replace(config.transport, port=0)),
                plane,
                parts.memory,
                worker_id,
                bus,
                on_commit=arrivals.on_commit,
                on_lost=arrivals.on_lost,
                stack=stack,
            )
        yield await stack.enter_async_context(
            open_store(
                config,
                worker_id,
                bus,
                watch,
                plane,
                pool=parts.pool,
                layout=parts.model.layout,
                leases=leases,
                arrivals=arrivals,
                receivers=kv_receivers,
                senders=kv_senders,
                on_freed=on_freed,
            )
        )
