"""The transport that moves no KV: a lease is granted and committed as ever, the state goes over the bus.

It goes by the name of shm, since the kinds are a closed list in the protocol: both ends are on one host.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec

from benchmarks.null_engine.model import LAYOUT
from distserve.bus.base import Bus, Delivery
from distserve.config import Config
from distserve.errors import DistServeError
from distserve.messages import Endpoint, RemoteRegion, SubmitReply, TrafficClass, decode_as, encode
from distserve.transport.base import Commit, Lease, OnLost, PoolMemory, Receiver, Sender, Span, Transfer, TransferFacts
from distserve.transport.select import host_key
from distserve.worker.data_plane import DataPlane

KIND = "shm"


class _Ending(msgspec.Struct, array_like=True):
    """What a commit carries."""

    lease_id: int
    epoch: int
    state: bytes


class NullReceiver(Receiver):
    kind = KIND

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._subject = f"distserve.null.{name}"
        self._granted_at: dict[int, float] = {}
        self._stack = AsyncExitStack()
        self._on_commit: Callable[[Commit], None] = lambda commit: None

    async def start(self, on_commit: Callable[[Commit], None], on_lost: OnLost) -> None:
        self._on_commit = on_commit
        await self._stack.enter_async_context(await self._bus.serve(self._subject, self._commit))

    async def _commit(self, delivery: Delivery) -> bytes:
        ending = msgspec.msgpack.decode(delivery.data, type=_Ending)
        self._on_commit(Commit(ending.lease_id, ending.epoch, ending.state, num_bytes=0))
        self._granted_at.pop(ending.lease_id, None)
        return encode(SubmitReply())

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(kind=KIND, host=host_key(), address=self._subject)

    def grant(self, lease: Lease) -> RemoteRegion:
        self._granted_at[lease.lease_id] = time.monotonic()
        return RemoteRegion(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            endpoint=self.endpoint,
            block_ids=lease.block_ids,
            layout=LAYOUT,
        )

    async def revoke(self, lease_id: int, epoch: int | None = None) -> None:
        self._granted_at.pop(lease_id, None)

    def idle_s(self, lease_id: int) -> float | None:
        granted_at = self._granted_at.get(lease_id)
        return None if granted_at is None else time.monotonic() - granted_at

    async def stop(self) -> None:
        await self._stack.aclose()


class NullTransfer(Transfer):
    def __init__(self, bus: Bus, region: RemoteRegion) -> None:
        self._bus = bus
        self._region = region

    @property
    def failure(self) -> DistServeError | None:
        return None

    @property
    def facts(self) -> TransferFacts:
        return TransferFacts(KIND, "prefill", 0, len(self._region.block_ids))

    def write(self, spans: Sequence[Span], *, awaited: bool = False) -> None:
        pass

    async def commit(self, state: bytes, *, timeout_s: float) -> int:
        """Raises what adopting raised, or the bus."""
        region = self._region
        ending = msgspec.msgpack.encode(_Ending(region.lease_id, region.epoch, state))
        decode_as(SubmitReply, await self._bus.request(region.endpoint.address, ending, timeout_s=timeout_s))
        return 0

    async def abort(self, reason: str) -> None:
        pass


class NullSender(Sender):
    kind = KIND

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def open(
        self, region: RemoteRegion, *, timeout_s: float, traffic_class: TrafficClass = "prefill", peer: str = ""
    ) -> Transfer:
        return NullTransfer(self._bus, region)

    async def stop(self) -> None:
        pass


# ------------------------------------------------------------ in place of what `worker.data_plane` makes


def null_plan(config: Config, memory: PoolMemory) -> DataPlane:
    return DataPlane([KIND], "auto", may_fall_back=False)


def null_senders(config: Config, plane: DataPlane, memory: PoolMemory, worker_id: str, bus: Bus) -> dict[str, Sender]:
    return {KIND: NullSender(bus)}


async def null_receivers(
    config: Config,
    plane: DataPlane,
    memory: PoolMemory,
    worker_id: str,
    bus: Bus,
    *,
    on_commit: Callable[[Commit], None],
    on_lost: OnLost,
    stack: AsyncExitStack,
) -> dict[str, Receiver]:
    receiver = NullReceiver(bus, worker_id)
    await receiver.start(on_commit, on_lost)
    stack.push_async_callback(receiver.stop)
    return {KIND: receiver}
