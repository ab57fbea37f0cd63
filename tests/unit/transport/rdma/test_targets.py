"""Where the receiver's blocks are, and what is written to them by which lane."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.errors import TransportError
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.rdma.connect import lane_for, rail_of
from distserve.transport.rdma.frames import Opened, Run
from distserve.transport.rdma.targets import Targets
from distserve.transport.rdma.written import Written
from distserve.transport.rows import PoolShape
from distserve.transport.spans import as_ids

LAYOUT = KVLayout(weights="test", dtype="float32", num_layers=3, num_kv_heads=1, head_dim=2, block_size=4, rope="{}")
SHAPE = PoolShape(100, LAYOUT)
BLOCK, LAYER = block_bytes(LAYOUT), layer_block_bytes(LAYOUT)


@given(
    order=st.permutations(range(12)),
    layers=st.tuples(st.integers(0, 2), st.integers(1, 3)).filter(lambda span: span[0] < span[1]),
    num_rails=st.integers(1, 3),
    stripe=st.integers(1, 5),
)
def test_every_row_is_written_once_to_its_place_by_its_rail(
    order: list[int], layers: tuple[int, int], num_rails: int, stripe: int
):
    start, stop = layers
    runs = {
        lane_for("prefill", rail): [Run(0, 5, 10_000, 7 + rail), Run(5, 7, 90_000, 70 + rail)]
        for rail in range(num_rails)
    }
    targets = Targets(Opened(1, 1, 3, runs), SHAPE, 12, num_rails, stripe)
    here = 1_000_000 + 5_000 * np.arange(12)  # no neighbours: nothing is joined
    found: dict[int, tuple[int, int]] = {}
    total = 0
    for lane, num_bytes, writes in targets.writes(Written(start, stop, as_ids(order), as_ids(order), "prefill"), here):
        rail = lane // 3
        assert lane == lane_for("prefill", rail)
        assert num_bytes == sum(write.length for write in writes)
        total += num_bytes
        for write in writes:
            position = (write.address - 1_000_000) // 5_000
            target = order[position]
            base = 10_000 + target * BLOCK if target < 5 else 90_000 + (target - 5) * BLOCK
            assert write.remote_address == base + start * LAYER
            assert write.rkey == (7 if target < 5 else 70) + rail
            assert num_rails == 1 or rail == rail_of(target, stripe, num_rails)
            found[target] = (write.address, write.length)
    assert sorted(found) == list(range(12))
    assert total == 12 * (stop - start) * LAYER


def test_runs_outside_the_lease_and_lanes_that_were_not_opened_are_refused():
    with pytest.raises(TransportError, match="a run outside it"):
        Targets(Opened(1, 1, 3, {1: [Run(0, 13, 0, 7)]}), SHAPE, 12, 1, 8)
    targets = Targets(Opened(1, 1, 3, {lane_for("prefill", 0): [Run(0, 5, 0, 7)]}), SHAPE, 12, 1, 8)
    for traffic_class, target in (("prefill", 5), ("decode", 0), ("background", 0)):
        written = Written(0, 3, as_ids([1]), as_ids([target]), traffic_class)  # type: ignore[arg-type]
        with pytest.raises(TransportError, match="was not opened for lane"):
            list(targets.writes(written, as_ids([0])))
