"""A pool's blocks as rows: what is summed one way must be what is summed another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.errors import KVError
from distserve.kv.checksum import block_sums
from distserve.kv.layout import layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.rows import GATHER_BYTES, PoolRows, short_runs
from distserve.transport.spans import as_ids
from tests.contracts.transport.pools import SMALL

LARGE = KVLayout(weights="t", dtype="bfloat16", num_layers=3, num_kv_heads=8, head_dim=64, block_size=16, rope="{}")
NUM_BLOCKS = 40


def rows_of(layout: KVLayout) -> PoolRows:
    shape = (NUM_BLOCKS, layout.num_layers, layer_block_bytes(layout))
    return PoolRows(np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8), layout)


ROWS = {"small": rows_of(SMALL), "large": rows_of(LARGE)}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ROWS)), st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=60), st.data())
def test_blocks_sum_to_the_same_walked_or_gathered_in_layers_or_whole(name, ids, data):
    rows = ROWS[name]
    cut = data.draw(st.integers(0, rows.num_layers))
    whole = block_sums(rows.words.view(np.uint8))[ids] if ids else np.zeros(0, np.uint64)
    total = np.zeros(len(ids), np.uint64)
    for start, stop in ((0, cut), (cut, rows.num_layers)):
        if start < stop:
            total += rows.sums_of(as_ids(ids), start, stop)
    assert total.tolist() == whole.tolist()


def test_neighbours_are_walked_and_scattered_small_blocks_gathered():
    assert not short_runs(1 << 20, 1)
    assert not short_runs(16 * GATHER_BYTES, 16)
    assert short_runs(256 * 4096, 256)
    assert not short_runs(4096, 1)  # one call either way


@pytest.mark.parametrize("name", sorted(ROWS))
def test_ranges_are_the_bytes_of_those_layers_in_order(name):
    rows = ROWS[name]
    flat = rows.words.view(np.uint8)
    for start, stop in ((0, rows.num_layers), (1, 2)):
        joined = b"".join(rows.ranges(3, 4, start, stop))
        assert joined == flat[3:7, start:stop].tobytes()
    assert len(rows.ranges(3, 4, 0, rows.num_layers)) == 1


def test_a_pool_of_another_shape_is_refused():
    with pytest.raises(KVError, match="must be contiguous uint8"):
        PoolRows(np.zeros((4, 2, 2048), np.uint8), SMALL)
