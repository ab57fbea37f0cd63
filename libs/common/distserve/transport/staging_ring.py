"""KV between a device's pool and pinned host memory that a transport can reach: the arithmetic, without a device.

Where a network card can't reach the GPU's memory, bytes go by host memory that the GPU copies to and from by itself:

    sending     pool --fetch--> a slot of the StagingRing --write--> peer
    receiving   peer --write--> blocks of the Landing (landing.py) --store--> pool

A Copier makes the copies; staging.py has the one for CUDA, HostCopier here is for pools in host memory.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from distserve.errors import ConfigError, DistServeError, KVError, TransportError
from distserve.kv.checksum import Words
from distserve.kv.layout import layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory, Span
from distserve.transport.fence import Fence
from distserve.transport.rows import PoolRows
from distserve.transport.spans import Ids, as_ids, pieces

log = logging.getLogger(__name__)

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Copy(Protocol):
    """A copy that has been started."""

    def wait(self) -> Words:
        """Blocks, without the GIL, until it is over; uint64 [n]: what the bytes add to each of the n blocks' checksums
        (kv/checksum.py), summed where the pool lies. Raises TransportError if the device failed."""


class Copier(Protocol):
    """Copies between one pool and pinned host memory. Copies of one direction are made in the order they are begun."""

    def pin(self, memory: Bytes) -> None:
        """Before memory is used for copies. Raises ConfigError (more than the system lets be pinned)."""

    def unpin(self, memory: Bytes) -> None:
        """No copy of it may be under way."""

    def mark(self) -> object:
        """What the calling thread has given the device up to now, for fetch(): on a GPU, kernels that still run."""

    def fetch(self, piece: Span, rows: Bytes, after: object) -> Copy:
        """Begin pool -> host once `after` is done. rows: uint8 [len(piece.source_blocks), layers of the piece,
        layer_block_bytes], pinned; not to be touched until the copy is over. Raises TransportError."""

    def store(self, blocks: Bytes, landed: Sequence[int], block_ids: Sequence[int]) -> Copy:
        """Begin host -> pool: blocks[landed[i]] goes to the pool's block block_ids[i]. blocks: uint8 [any, num_layers,
        layer_block_bytes], pinned. The sums are of what then lies in the pool. Raises TransportError."""

    def sums(self, block_ids: Ids, layer_start: int, layer_stop: int, after: object) -> Copy:
        """Begin summing these layers of blocks of the pool, where they lie, once `after` is done; no bytes are copied.
        Raises TransportError."""


@dataclass(frozen=True, slots=True)
class _Done:
    sums: Words

    def wait(self) -> Words:
        return self.sums


class HostCopier:
    """For a pool in host memory: copies at once."""

    def __init__(self, memory: PoolMemory) -> None:
        self._rows = PoolRows(memory.blocks, memory.layout)
        self._pool: Bytes = memory.blocks

    def pin(self, memory: Bytes) -> None: ...

    def unpin(self, memory: Bytes) -> None: ...

    def mark(self) -> object:
        return None

    def fetch(self, piece: Span, rows: Bytes, after: object) -> Copy:
        ids = as_ids(piece.source_blocks)
        rows[:] = self._pool[ids, piece.layer_start : piece.layer_stop]
        return _Done(self._rows.sums_of(ids, piece.layer_start, piece.layer_stop))

    def store(self, blocks: Bytes, landed: Sequence[int], block_ids: Sequence[int]) -> Copy:
        ids = as_ids(block_ids)
        self._pool[ids] = blocks[as_ids(landed)]
        return _Done(self._rows.sums_of(ids, 0, self._rows.num_layers))

    def sums(self, block_ids: Ids, layer_start: int, layer_stop: int, after: object) -> Copy:
        return _Done(self._rows.sums_of(block_ids, layer_start, layer_stop))


def map_bytes(num_bytes: int, name: str) -> tuple[int, Bytes]:
    """(descriptor, zeros): page-aligned memory that a peer on this host can map too. It is there as long as the array
    is; the descriptor is the caller's to close. Raises ConfigError."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            # A peer that shrank the file would turn our next access into SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return fd, np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
        except BaseException:
            os.close(fd)
            raise
    except (OSError, ValueError, OverflowError) as e:
        raise ConfigError(
            f"can't map {num_bytes} bytes of staging memory: {e}; fewer or smaller slots would do",
            key="slot_bytes",
            value=num_bytes,
            expected="staging memory that fits",
        ) from e


@dataclass(slots=True, eq=False)
class Staged:
    """A piece of a span in a slot, the writer's until release(): rows of `row_bytes` each, layers [layer_start,
    layer_stop) of piece.source_blocks[i] at address + i * row_bytes."""

    piece: Span
    address: int
    offset: int  # of the same bytes in the ring's memory
    row_bytes: int
    sums: Words  # uint64 [rows], what each row adds to its block's checksum
    _release: Callable[[], None] = field(repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _released: bool = False

    @property
    def length(self) -> int:
        return len(self.piece.source_blocks) * self.row_bytes

    def release(self) -> None:
        """The bytes have left, or never will: the slot is used again. Any thread; idempotent, so that a completion and
        an abort may both say it."""
        with self._lock:
            if self._released:
                return
            self._released = True
        self._release()


class Sink(Protocol):
    """Who writes what is staged. Called on the ring's thread, one call at a time; must not block."""

    def staged(self, staged: Staged) -> None:
        """In the order of submission. The sink owns the slot until it calls staged.release()."""

    def failed(self, error: DistServeError) -> None:
        """A piece could not be staged; it holds no slot. Others of the same submission may still come."""


@dataclass(frozen=True, slots=True)
class _Job:
    piece: Span
    fence: Fence
    sink: Sink
    after: object


class StagingRing:
    """Slots of pinned memory, used in turn: while one is being written to the peer, the next are being filled.

    One thread begins copies, as long as there is a free slot; another waits for the oldest copy and hands it on. Each
    slot is in one place: free, being filled, or held by a sink (check()). Slots come back in any order, so a slow peer
    delays others only by the slots that it holds.

    A transfer's fence is round its blocks: it is entered for each copy and left when that copy is over. So once
    `await fence.shut()` has returned the pool's blocks are read no more; what was queued is skipped, and what was being
    filled then is not handed on. What a sink already holds is a copy, and the sink's to release.
    """

    def __init__(
        self,
        copier: Copier,
        layout: KVLayout,
        *,
        num_slots: int = 4,
        slot_bytes: int = 16 << 20,
        name: str = "kv-stage",
    ) -> None:
        """slot_bytes: at least a layer block; on a GPU enough that a copy takes longer than it takes to begin one,
        which costs some hundred microseconds. num_slots: at least 2 (one filling, one leaving)."""
        self._layer_bytes = layer_block_bytes(layout)
        for key, value, least in (("num_slots", num_slots, 2), ("slot_bytes", slot_bytes, self._layer_bytes)):
            if value < least:
                raise ConfigError(
                    f"{key} of the staging ring is {value}, must be at least {least}",
                    key=key,
                    value=value,
                    expected=f">= {least}",
                )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        # Slots start on a page, so that neighbours share none.
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._copier = copier
        self.fd, self.memory = map_bytes(num_slots * self._stride, name)
        self.address = int(self.memory.ctypes.data)
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._free: deque[int] = deque(range(num_slots))
        self._num_filling = 0
        self._num_held = 0
        self._closed = False
        self._filling: queue.SimpleQueue[tuple[_Job, int, Copy] | None] = queue.SimpleQueue()
        try:
            copier.pin(self.memory)
        except BaseException:
            os.close(self.fd)
            raise
        self._threads = [
            threading.Thread(target=run, name=f"{name}-{what}", daemon=True)
            for run, what in ((self._begin_copies, "copy"), (self._hand_on, "done"))
        ]
        for thread in self._threads:
            thread.start()

    # -- from any thread

    def submit(self, spans: Sequence[Span], fence: Fence, sink: Sink, after: object = None) -> int:
        """Queue spans; never blocks. Returns the number of pieces that will be staged, each of at most a slot. The
        pool's bytes for these layers are final once `after` is done: a mark() of the copier, or None for what the
        calling thread has given the device up to now. Raises TransportError if the ring is closed."""
        after = self._copier.mark() if after is None else after
        jobs = [_Job(p, fence, sink, after) for s in spans for p in pieces(s, self._layer_bytes, self.slot_bytes)]
        with self._changed:
            if self._closed:
                raise TransportError("the staging ring is closed")
            self._jobs.extend(jobs)
            self._changed.notify()
        return len(jobs)

    def check(self) -> None:
        """Every slot is in one place. Raises KVError."""
        with self._changed:
            free, filling, held = len(self._free), self._num_filling, self._num_held
            if free + filling + held != self.num_slots or len(set(self._free)) != free:
                raise KVError(f"{free} slots are free, {filling} being filled, {held} held, of {self.num_slots}")

    @property
    def num_free(self) -> int:
        with self._changed:
            return len(self._free)

    def close(self, timeout_s: float = 5.0) -> None:
        """Waits for copies under way; what is queued fails. Sinks may still hold slots: their bytes stay readable until
        drop_memory(), but are pinned no more. Idempotent. Raises TransportError if the device does not come to an end
        in time, and may then be called again."""
        with self._changed:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._changed.notify()
        for job in left:
            _tell(job.sink, TransportError("the staging ring was closed"))
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                raise TransportError(f"the device did not finish its copies within {timeout_s} s", timeout_s=timeout_s)
        with self._changed:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            self._copier.unpin(self.memory)
            os.close(fd)

    def drop_memory(self) -> None:
        """After close(), once nobody reads slots any more."""
        self.memory = np.empty(0, np.uint8)

    # -- the threads

    def _begin_copies(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._jobs and self._free))
                if self._closed:
                    self._filling.put(None)
                    return
                job = self._jobs.popleft()
                if not job.fence.enter():
                    continue
                slot = self._free.popleft()
                self._num_filling += 1
            try:
                copy = self._copier.fetch(job.piece, self._rows(slot, job.piece), job.after)
            except Exception as e:
                self._give_up(job, slot, e)
            else:
                self._filling.put((job, slot, copy))

    def _hand_on(self) -> None:
        while (item := self._filling.get()) is not None:
            job, slot, copy = item
            try:
                sums = copy.wait()
            except Exception as e:
                self._give_up(job, slot, e)
                continue
            job.fence.leave()
            with self._changed:
                self._num_filling -= 1
                self._num_held += 1
            staged = self._staged(job.piece, slot, sums)
            if job.fence.closed:
                staged.release()
                continue
            try:
                job.sink.staged(staged)
            except Exception as e:
                log.exception("a staged piece was not taken")
                staged.release()
                _tell(job.sink, _as_ours(e))

    def _give_up(self, job: _Job, slot: int, error: Exception) -> None:
        job.fence.leave()
        with self._changed:
            self._num_filling -= 1
            self._free.append(slot)
            self._changed.notify()
        _tell(job.sink, _as_ours(error))

    def _take_back(self, slot: int) -> None:
        with self._changed:
            self._num_held -= 1
            self._free.append(slot)
            self._changed.notify()

    def _staged(self, piece: Span, slot: int, sums: Words) -> Staged:
        offset = slot * self._stride
        row_bytes = (piece.layer_stop - piece.layer_start) * self._layer_bytes
        return Staged(piece, self.address + offset, offset, row_bytes, sums, lambda: self._take_back(slot))

    def _rows(self, slot: int, piece: Span) -> Bytes:
        shape = (len(piece.source_blocks), piece.layer_stop - piece.layer_start, self._layer_bytes)
        start = slot * self._stride
        return self.memory[start : start + int(np.prod(shape))].reshape(shape)


def _as_ours(error: Exception) -> DistServeError:
    if isinstance(error, DistServeError):
        return error
    return TransportError(f"staging failed: {type(error).__name__}: {error}")


def _tell(sink: Sink, error: DistServeError) -> None:
    try:
        sink.failed(error)
    except Exception:
        log.exception("a failure of staging was not taken: %s", error)
