"""Whether the bytes of a lease that is whole are those that were sent; and, if they have landed in host memory, their
way into the pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeAlias

from distserve.errors import ChecksumMismatch, DistServeError, TransportError
from distserve.transport.fence import Fence, post
from distserve.transport.inbound import InboundLease
from distserve.transport.landing import Landing
from distserve.transport.rdma.exposure import Exposure
from distserve.transport.rdma.pool_access import PoolAccess

log = logging.getLogger(__name__)

Verified: TypeAlias = Callable[[DistServeError | None], object]  # on the loop


class Verifier(Protocol):
    def verify(self, exposure: Exposure, done: Verified) -> None:
        """On the reactor's thread; the lease's windows are gone, its commit has come. `done` is told on the loop what
        is wrong with it, or None; never if this has been stopped."""

    def is_storing(self, lease: InboundLease) -> bool:
        """Something may still write into its blocks."""

    async def shut(self, lease: InboundLease) -> None:
        """Returns when that is not so, and will not be."""

    async def stop(self) -> None: ...


class PoolVerifier:
    """The bytes are in the pool: sums them there, on a thread of its own, since that reads every byte."""

    def __init__(self, access: PoolAccess, loop: asyncio.AbstractEventLoop) -> None:
        self._access = access
        self._loop = loop
        self._summing = ThreadPoolExecutor(1, "kv-verify-rdma")

    def verify(self, exposure: Exposure, done: Verified) -> None:
        try:
            self._summing.submit(self._verify, exposure, done)
        except RuntimeError:
            pass  # stopping

    def is_storing(self, lease: InboundLease) -> bool:
        return False

    async def shut(self, lease: InboundLease) -> None: ...

    async def stop(self) -> None:
        await asyncio.to_thread(self._summing.shutdown, cancel_futures=True)

    def _verify(self, exposure: Exposure, done: Verified) -> None:
        """The sender has seen to it that each layer of each block was written once."""
        lease, commit = exposure.lease, exposure.commit
        assert commit is not None
        error: DistServeError | None = None
        try:
            lease.sums = self._access.sums(lease.block_ids, 0, lease.rows.num_layers, self._access.mark())
            lease.placed[:] = True
            lease.num_placed = lease.placed.size
            lease.verify(commit.head)
        except Exception as e:  # nobody else would tell the sender
            error = _as_ours(lease, e)
        post(self._loop, done, error)


class LandingVerifier:
    """The bytes are in the landing: stores them in the pool and compares what lies there then.

    The lease's own fence was shut when it was whole. Round its blocks in the pool there is another from then on, for
    the one copy into them: who revokes the lease waits for that.
    """

    def __init__(self, landing: Landing, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        """timeout_s: for the device to take one lease's blocks."""
        self._landing = landing
        self._loop = loop
        self._timeout_s = timeout_s
        self._fences: dict[InboundLease, Fence] = {}  # of leases being stored
        self._tasks: set[asyncio.Task[None]] = set()

    def verify(self, exposure: Exposure, done: Verified) -> None:
        assert exposure.place is not None
        landed = tuple(exposure.place.take().tolist())
        self._fences[exposure.lease] = Fence()
        if not post(self._loop, self._begin, exposure, landed, done):
            self._landing.release(landed)

    def is_storing(self, lease: InboundLease) -> bool:
        return lease in self._fences

    async def shut(self, lease: InboundLease) -> None:
        if (fence := self._fences.get(lease)) is not None:
            await fence.shut()  # for as long as the device takes: the blocks must not be given to others before

    async def stop(self) -> None:
        for fence in list(self._fences.values()):
            fence.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._timeout_s)
        for task in self._tasks:
            task.cancel()

    def _begin(self, exposure: Exposure, landed: tuple[int, ...], done: Verified) -> None:
        task = self._loop.create_task(self._store(exposure, landed, done), name=f"store {exposure.lease.lease_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _store(self, exposure: Exposure, landed: tuple[int, ...], done: Verified) -> None:
        lease, commit = exposure.lease, exposure.commit
        assert commit is not None
        fence, block_ids, sums = self._fences[lease], tuple(lease.block_ids.tolist()), commit.head.sums
        error: DistServeError | None = None
        try:
            if len(sums) != len(landed):
                self._landing.release(landed)
                raise TransportError(
                    f"lease {lease.lease_id} has {len(landed)} blocks, its commit names {len(sums)}",
                    lease_id=lease.lease_id,
                )
            await self._landing.unstage(landed, block_ids, sums, fence, timeout_s=self._timeout_s)
        except Exception as e:
            error = _as_ours(lease, e)
        if error is None:
            self._fences.pop(lease)
            done(None)
            return
        done(error)
        await fence.shut()
        self._fences.pop(lease)


def _as_ours(lease: InboundLease, error: Exception) -> DistServeError:
    if isinstance(error, ChecksumMismatch) and "lease_id" not in error.fields:
        return ChecksumMismatch(error.message, lease_id=lease.lease_id, block_index=error.fields["block_index"])
    if isinstance(error, DistServeError):
        return error
    log.error("lease %d could not be verified", lease.lease_id, exc_info=error)
    return TransportError(f"lease {lease.lease_id} could not be verified: {type(error).__name__}: {error}")
