"""A prefill worker's part in the store."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

import msgspec

from distserve.bus.base import Bus, Watch
from distserve.config import Config
from distserve.transport.base import Sender
from distserve.worker.boot import EngineParts
from distserve.worker.data_plane import DataPlane
from distserve.worker.store.sharing import Sharing, share


def prefix_store(
    config: Config,
    worker_id: str,
    bus: Bus,
    watch: Watch,
    parts: EngineParts,
    plane: DataPlane,
    senders: Mapping[str, Sender],
    on_freed: Callable[[], None],
) -> AbstractAsyncContextManager[Sharing]:
    """Without kvstore.use or kv.prefix_cache there is nothing to fetch, and no receiver."""
    # transport.port is decode's, which may run beside it under the same configuration.
    config = msgspec.structs.replace(config, transport=msgspec.structs.replace(config.transport, port=0))
    receives = config.kvstore.use and config.kv.prefix_cache
    return share(config, worker_id, bus, watch, parts, plane, senders, receives=receives, on_freed=on_freed)
