"""Where a lease's blocks lie at the receiver, and the keys that one link writes them with. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from distserve.errors import TransportError
from distserve.transport.rdma.connect import lane_for, rail_of
from distserve.transport.rdma.frames import Opened
from distserve.transport.rdma.lanes import Bulk
from distserve.transport.rdma.written import Written, joined
from distserve.transport.rows import PoolShape
from distserve.transport.spans import Ids


class Targets:
    def __init__(self, opened: Opened, shape: PoolShape, num_blocks: int, num_rails: int, stripe_blocks: int) -> None:
        """opened: the receiver's word; num_blocks: of the lease. Raises TransportError if it names others."""
        self.ticket = opened.ticket
        self._lease_id = opened.lease_id
        self._shape = shape
        self._num_rails, self._stripe_blocks = num_rails, stripe_blocks
        self._addresses: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        # [lanes, blocks]: of the run that the block is in
        self._keys: npt.NDArray[np.int64] = np.full((max(opened.runs, default=0) + 1, num_blocks), -1, np.int64)
        for lane, runs in opened.runs.items():
            for run in runs:
                stop = run.first + run.count
                if not 0 <= run.first < stop <= num_blocks:
                    raise TransportError(f"lease {self._lease_id} was opened with a run outside it", value=str(run))
                self._addresses[run.first : stop] = run.address + shape.block_bytes * np.arange(run.count)
                self._keys[lane, run.first : stop] = run.rkey

    def writes(self, written: Written, here: Ids) -> Iterator[tuple[int, int, list[Bulk]]]:
        """(lane, bytes, work requests) for each lane that carries some of it. here: the address of each of its blocks'
        rows. Raises TransportError for a lane that the lease was not opened for."""
        if self._num_rails == 1:
            yield self._of_lane(written, lane_for(written.traffic_class, 0), here, written.targets)
            return
        rails = rail_of(written.targets, self._stripe_blocks, self._num_rails)
        for rail in range(self._num_rails):
            chosen = rails == rail
            if chosen.any():
                lane = lane_for(written.traffic_class, rail)
                yield self._of_lane(written, lane, here[chosen], written.targets[chosen])

    def _of_lane(self, written: Written, lane: int, here: Ids, targets: Ids) -> tuple[int, int, list[Bulk]]:
        keys = self._keys[lane, targets] if lane < len(self._keys) else np.full(len(targets), -1)
        if (keys < 0).any():
            raise TransportError(f"lease {self._lease_id} was not opened for lane {lane}", lease_id=self._lease_id)
        height = (written.layer_stop - written.layer_start) * self._shape.layer_bytes
        there = self._addresses[targets] + written.layer_start * self._shape.layer_bytes
        whole_blocks = height == self._shape.block_bytes
        return lane, len(targets) * height, joined(here, there, keys, height, whole_blocks)
