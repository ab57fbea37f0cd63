"""What a transfer has been given to write: checked, summed, counted and cut into work requests. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distserve.errors import TransportError
from distserve.kv.checksum import Words
from distserve.messages import TrafficClass
from distserve.transport.rdma.lanes import MAX_WRITE_BYTES, Bulk
from distserve.transport.rdma.pool_access import SumRows
from distserve.transport.spans import Ids

SUM_BYTES = 8 << 20  # summed at a time: between two a transfer that has ended is noticed


@dataclass(frozen=True, slots=True)
class Written:
    """A span whose bytes are final once `after` is done, kept until the lease ends: a link that is built anew is
    written from the start."""

    layer_start: int
    layer_stop: int
    sources: Ids
    targets: Ids
    traffic_class: TrafficClass
    after: object = None  # what the pool's device must have done before (Copier.mark)


class Coverage:
    """Which layers of which blocks have been written. The receiver sees no single write, so the writer checks that
    each was written once."""

    def __init__(self, num_layers: int, num_blocks: int, lease_id: int) -> None:
        self._lease_id = lease_id
        self._placed: npt.NDArray[np.bool_] = np.zeros((num_layers, num_blocks), np.bool_)
        self.num_placed = 0  # layer blocks, doubles counted

    def add(self, written: Written) -> None:
        self._placed[written.layer_start : written.layer_stop, written.targets] = True
        self.num_placed += (written.layer_stop - written.layer_start) * len(written.targets)

    def missing(self) -> TransportError | None:
        """What keeps the lease from being committed."""
        if not self._placed.all():
            layer, index = (int(x) for x in np.argwhere(~self._placed)[0])
            return TransportError(
                f"lease {self._lease_id} is committed but layer {layer} of its block {index} was never written",
                lease_id=self._lease_id,
                block_index=index,
                layer=layer,
            )
        if self.num_placed != self._placed.size:
            return TransportError(
                f"lease {self._lease_id}: {self.num_placed} layer blocks were written into {self._placed.size}, "
                "each must be written once",
                lease_id=self._lease_id,
            )
        return None


def sums_of(written: Written, sums_of_rows: SumRows, layer_bytes: int, stop: Callable[[], bool]) -> Words:
    """What it adds to each target's checksum, uint64 [len(targets)]; not all of it if stop() says so."""
    sums: Words = np.zeros(len(written.targets), np.uint64)
    step = max(1, SUM_BYTES // ((written.layer_stop - written.layer_start) * layer_bytes))
    for i in range(0, len(sums), step):
        if stop():
            break
        part = written.sources[i : i + step]
        sums[i : i + step] = sums_of_rows(part, written.layer_start, written.layer_stop, written.after)
    return sums


def joined(here: Ids, there: Ids, keys: Ids, size: int, may_join: bool) -> list[Bulk]:
    """One write for each piece of `size` bytes, neighbours that lie one after the other on both sides and under one key
    made one; none longer than MAX_WRITE_BYTES unless a single piece is, which is cut."""
    writes: list[Bulk] = []
    for a, b, key in zip(here.tolist(), there.tolist(), keys.tolist(), strict=True):
        last = writes[-1] if writes else None
        if (
            may_join
            and last is not None
            and last.rkey == key
            and last.address + last.length == a
            and last.remote_address + last.length == b
            and last.length + size <= MAX_WRITE_BYTES
        ):
            last.length += size
            continue
        for start in range(0, size, MAX_WRITE_BYTES):
            writes.append(Bulk(a + start, min(MAX_WRITE_BYTES, size - start), b + start, key))
    return writes
