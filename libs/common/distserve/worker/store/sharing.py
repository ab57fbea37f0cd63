"""A worker's part in the store, and the receivers of its pool, which take what it fetches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distserve.bus.base import Bus, Watch
from distserve.config import Config
from distserve.kv.lease import LeaseTable, first_epoch
from distserve.transport.base import Commit, OnLost, Receiver, Sender
from distserve.worker.data_plane import DataPlane, receivers
from distserve.worker.store.arrivals import Arrivals
from distserve.worker.store.opening import Store, open_store

if TYPE_CHECKING:
    from distserve.worker.boot import EngineParts  # which loads torch


@dataclass(frozen=True, slots=True)
class Sharing:
    """`leases`: all that are granted at `receivers`, of fetches and, at a decode worker, of hand-overs."""

    plane: DataPlane
    leases: LeaseTable
    receivers: dict[str, Receiver]
    store: Store


@asynccontextmanager
async def share(
    config: Config,
    worker_id: str,
    bus: Bus,
    watch: Watch,
    parts: EngineParts,
    plane: DataPlane,
    senders: Mapping[str, Sender],
    *,
    receives: bool,
    on_commit: Callable[[Commit], None] | None = None,
    on_lost: OnLost | None = None,
    on_freed: Callable[[], None],
) -> AsyncIterator[Sharing]:
    """receives: there are receivers, one for each of the plane's kinds. on_commit, on_lost: of leases that are not
    fetches'. on_freed: blocks that were lent to the store are back."""
    plane.in_use.follow(watch)
    leases, arrivals = LeaseTable(first_epoch()), Arrivals(on_commit, on_lost)
    async with AsyncExitStack() as stack:
        started: dict[str, Receiver] = {}
        if receives:
            started = await receivers(
                config,
                plane,
                parts.memory,
                worker_id,
                bus,
                on_commit=arrivals.on_commit,
                on_lost=arrivals.on_lost,
                stack=stack,
            )
        store = await stack.enter_async_context(
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
                receivers=started,
                senders=senders,
                on_freed=on_freed,
            )
        )
        yield Sharing(plane, leases, started, store)
