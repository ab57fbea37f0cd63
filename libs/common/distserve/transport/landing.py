"""Pinned host blocks that leases land in, on the way to a pool that peers can't write to."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from distserve.errors import ChecksumMismatch, ConfigError, KVError, LeaseRevoked, PoolExhausted, TransportError
from distserve.kv.checksum import Words
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory
from distserve.transport.fence import Fence
from distserve.transport.staging_ring import Copier, map_bytes

Ids = Sequence[int]


class Landing:
    """A host pool of the same layout as the device's. A lease's blocks are reserved here and granted from here; when
    all has come, unstage() copies them to their blocks in the device's pool, and only then is the lease adopted.

    A lease stays here as a whole until it is complete, since a peer's RDMA writes are not told one by one. So
    num_blocks bounds the blocks of leases that are open at once: size it for those, a lease that finds no room waits.

    memory: what a host Receiver is made on. As in every pool, block 0 is never used: there is one more than num_blocks.
    Each block is free, reserved, or being stored (check()).
    """

    def __init__(self, copier: Copier, layout: KVLayout, num_blocks: int, name: str = "kv-landing") -> None:
        if num_blocks < 1:
            raise ConfigError(
                f"num_blocks of the landing is {num_blocks}, must be at least 1",
                key="num_blocks",
                value=num_blocks,
                expected=">= 1",
            )
        self.num_blocks = num_blocks
        self._copier = copier
        fd, self._bytes = map_bytes((num_blocks + 1) * block_bytes(layout), name)
        blocks = self._bytes.reshape(num_blocks + 1, layout.num_layers, layer_block_bytes(layout))
        self.memory = PoolMemory(layout=layout, blocks=blocks, fd=fd)
        self._lock = threading.Lock()
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._reserved: set[int] = set()
        self._num_storing = 0
        self._closed = False
        self._stores: set[Future[Words]] = set()  # under way
        self._on_room: Callable[[], object] = lambda: None
        try:
            copier.pin(self._bytes)
        except BaseException:
            os.close(fd)
            raise
        # Two: the next lease's copies are queued while the last one's are awaited.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix=name)

    @property
    def num_free(self) -> int:
        with self._lock:
            return len(self._free)

    def on_room(self, call: Callable[[], object]) -> None:
        """Called from now on, on any thread, whenever blocks have come back."""
        self._on_room = call

    def reserve(self, count: int) -> tuple[int, ...]:
        """Ids of `count` blocks in `memory`. Raises PoolExhausted, and has then taken none."""
        with self._lock:
            if count > len(self._free):
                raise PoolExhausted(
                    f"{count} staging blocks are wanted, {len(self._free)} of {self.num_blocks} are free",
                    wanted=count,
                    free=len(self._free),
                    total=self.num_blocks,
                )
            ids = tuple(self._free.popleft() for _ in range(count))
            self._reserved.update(ids)
            return ids

    def release(self, landed: Ids) -> None:
        """Of a lease that is not going to be unstaged; its writer must have been fenced. Raises KVError for blocks
        that are not reserved, and has then released none."""
        with self._lock:
            self._take(landed)
            self._free.extend(landed)
        self._on_room()

    async def unstage(self, landed: Ids, block_ids: Ids, sums: Words, fence: Fence, *, timeout_s: float) -> None:
        """Copy landed[i] to the device's block block_ids[i] and compare the checksums of what lies there with `sums`,
        uint64 [n], those of the sender. The reservation ends with the copy, whatever comes of it.

        The copy is inside `fence`, that of the lease: until `await fence.shut()` has returned, block_ids may still be
        written to, also after a time-out here. Raises LeaseRevoked (the fence is shut), ChecksumMismatch,
        TransportError (the device failed, or was too slow), KVError (blocks that are not reserved).
        """
        if not len(landed) == len(block_ids) == len(sums):
            raise KVError(f"{len(landed)} landed blocks, {len(block_ids)} to store them in and {len(sums)} checksums")
        with self._lock:
            if self._closed:
                raise TransportError("the landing is closed")
            self._take(landed)
            if is_open := fence.enter():
                self._num_storing += len(landed)
                # Under the lock too: were the landing closed in between, nobody would ever leave the fence.
                store = self._threads.submit(self._store, landed, block_ids, fence)
                self._stores.add(store)
            else:
                self._free.extend(landed)
        if not is_open:
            self._on_room()
            raise LeaseRevoked("the lease was revoked before it was unstaged")
        store.add_done_callback(self._stores.discard)
        try:
            async with asyncio.timeout(timeout_s):
                found = await asyncio.shield(asyncio.wrap_future(store))
        except TimeoutError:
            raise TransportError(
                f"the device did not take {len(landed)} blocks within {timeout_s} s", timeout_s=timeout_s
            ) from None
        if (differing := np.flatnonzero(found != sums)).size:
            index = int(differing[0])
            raise ChecksumMismatch(
                f"block {index} of a lease lies in the device's pool with other bytes than were sent "
                f"({differing.size} of {len(landed)} blocks differ)",
                block_index=index,
            )

    def check(self) -> None:
        """Every block is in one place. Raises KVError."""
        with self._lock:
            free, reserved, storing = len(self._free), len(self._reserved), self._num_storing
            if free + reserved + storing != self.num_blocks or self._reserved & set(self._free):
                raise KVError(f"{free} blocks are free, {reserved} reserved, {storing} stored, of {self.num_blocks}")

    def close(self, timeout_s: float = 5.0) -> None:
        """Waits for copies under way. The memory goes: no receiver may be on it any more. Idempotent. Raises
        TransportError if the device does not come to an end in time, and may then be called again."""
        with self._lock:
            self._closed = True
            stores = set(self._stores)
        if futures.wait(stores, timeout_s).not_done:
            raise TransportError(f"the device did not finish its copies within {timeout_s} s", timeout_s=timeout_s)
        self._threads.shutdown(wait=True)
        with self._lock:
            fd, self.memory.fd = self.memory.fd, None
        if fd is not None:
            self._copier.unpin(self._bytes)
            self.memory.blocks = self.memory.blocks[:0].copy()
            self._bytes = self.memory.blocks
            os.close(fd)

    def _take(self, landed: Ids) -> None:
        """Out of the reserved ones. Under the lock."""
        if len(set(landed)) != len(landed) or not self._reserved.issuperset(landed):
            wrong = next((i for i in landed if i not in self._reserved), None)
            raise KVError(f"staging block {wrong} is not reserved" if wrong is not None else "a block is named twice")
        self._reserved.difference_update(landed)

    def _store(self, landed: Ids, block_ids: Ids, fence: Fence) -> Words:
        try:
            return self._copier.store(self.memory.blocks, landed, block_ids).wait()
        except (TransportError, KVError):
            raise
        except Exception as e:
            raise TransportError(f"storing landed blocks failed: {type(e).__name__}: {e}") from e
        finally:
            fence.leave()
            with self._lock:
                self._num_storing -= len(landed)
                self._free.extend(landed)
            self._on_room()
