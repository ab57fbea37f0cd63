"""Where the device reads what a transfer writes, and who sums it: PooledSource is for a pool that the device reaches,
in host memory or a GPU's as a dma-buf; staged_source.py is for one that it doesn't."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

import numpy as np

from distserve.errors import DistServeError, PeerLost, TransportError
from distserve.kv.checksum import Words
from distserve.transport.rdma.pool_access import PoolAccess
from distserve.transport.rdma.reactor import Reactor
from distserve.transport.rdma.written import Written, sums_of
from distserve.transport.rows import PoolShape
from distserve.transport.spans import Ids

Done = Callable[[], object]


class Writer(Protocol):
    """What a source needs of its transfer. All for the reactor's thread, but crashed()."""

    lease_id: int
    is_over: bool  # nothing more is written
    sums: Words  # of each block of the lease, as far as they are known

    @property
    def is_open(self) -> bool:
        """There is a link, and it has been told where to write."""

    def post(self, written: Written, here: Ids, done: Done | None = None) -> None:
        """Queue it on the link; here: the address of each of its rows. done: the device has read them all; never
        called if the link breaks before or the transfer ends. Raises TransportError."""

    def read_on(self) -> None:
        """is_busy may be false by now."""

    def withdraw(self, error: DistServeError, reason: str, cause: DistServeError | None = None) -> None: ...

    def crashed(self, error: DistServeError) -> None:
        """The reactor's thread has ended. For any thread."""


class Source(Protocol):
    """One transfer's. For the reactor's thread, but mark() and abandon()."""

    def mark(self) -> object:
        """For Written.after: what the calling thread has given the pool's device up to now. Any thread."""

    def add(self, written: Written) -> None:
        """Post it, now or once it can be, and again on each link to come. Raises TransportError."""

    def begin(self) -> None:
        """The transfer is open on a link: everything is to be written on it. Raises TransportError."""

    def detach(self) -> None:
        """The link is gone, its pairs destroyed."""

    @property
    def is_busy(self) -> bool:
        """Something that was added is not posted on this link yet, or not summed."""

    def cease(self) -> None:
        """The transfer is over: nothing more is read for it that is not being read now."""

    def let_go(self) -> None:
        """The device reads nothing more for it."""

    def when_unread(self, done: Done) -> None:
        """After cease() and let_go(): calls it once nobody reads the pool's blocks for this transfer."""

    def abandon(self, done: Done) -> None:
        """when_unread() on the event loop, if the reactor's thread has ended and the devices with it."""


class PooledSource:
    """Sums on a thread of its own, since that reads every byte. Where the pool's device computes on its own time
    (`waits`), a span is posted only when its sums are there: only then are its bytes known to be."""

    def __init__(
        self, writer: Writer, access: PoolAccess, shape: PoolShape, reactor: Reactor, summing: Executor, *, waits: bool
    ) -> None:
        self._writer = writer
        self._address = access.memory.address
        self._access = access
        self._shape = shape
        self._reactor = reactor
        self._summing = summing
        self._waits = waits
        self._final: list[Written] = []  # may be read
        self._num_summing = 0  # spans that the summing thread still reads
        self._on_unread: list[Done] = []

    def mark(self) -> object:
        return self._access.mark()

    def add(self, written: Written) -> None:
        if not self._waits:
            self._may_be_read(written)
        # After posting: the device is at work meanwhile. On a thread of its own: the reactor must answer.
        self._num_summing += 1
        try:
            self._summing.submit(self._sum, written)
        except RuntimeError:  # stopping
            self._num_summing -= 1

    def begin(self) -> None:
        for written in self._final:
            self._post(written)

    def detach(self) -> None: ...

    @property
    def is_busy(self) -> bool:
        return bool(self._num_summing)

    def cease(self) -> None: ...  # the summing thread looks whether the transfer is over

    def let_go(self) -> None:
        self._final.clear()

    def when_unread(self, done: Done) -> None:
        if self._num_summing:
            self._on_unread.append(done)
        else:
            done()

    def abandon(self, done: Done) -> None:
        done()

    def _may_be_read(self, written: Written) -> None:
        self._final.append(written)
        if self._writer.is_open:
            self._post(written)

    def _post(self, written: Written) -> None:
        offset = written.layer_start * self._shape.layer_bytes
        self._writer.post(written, self._address + written.sources * self._shape.block_bytes + offset)

    def _sum(self, written: Written) -> None:
        """On the summing thread."""
        writer, error = self._writer, None
        sums: Words = np.zeros(len(written.targets), np.uint64)
        try:
            sums = sums_of(written, self._access.sums, self._shape.layer_bytes, lambda: writer.is_over)
        except Exception as e:  # nobody else would end the transfer
            error = TransportError(f"lease {writer.lease_id} could not be summed: {type(e).__name__}: {e}")
        if not self._reactor.call(lambda: self._summed(written, sums, error)):
            writer.crashed(PeerLost("the rdma devices of this host are closed"))

    def _summed(self, written: Written, sums: Words, error: TransportError | None) -> None:
        writer = self._writer
        np.add.at(writer.sums, written.targets, sums)
        self._num_summing -= 1
        try:
            if error is None and self._waits and not writer.is_over:
                self._may_be_read(written)
        except TransportError as e:
            error = e
        if error is not None:
            writer.withdraw(error, error.message, error)
        if self._num_summing:
            return
        waiting, self._on_unread = self._on_unread, []
        for done in waiting:
            done()
        writer.read_on()
