"""Layout arithmetic, fingerprints and refusals."""

from __future__ import annotations

import msgspec
import pytest

from distserve.errors import ConfigError, LayoutMismatch
from distserve.kv.layout import block_bytes, block_shape, fingerprint, layer_block_bytes, require_same
from distserve.messages import KVLayout

LAYOUT = KVLayout(
    weights="abc", dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, rope='{"theta":1}'
)
OTHERS = {
    "weights": "abd",
    "dtype": "float16",  # as wide, and still another
    "num_layers": 31,
    "num_kv_heads": 6,
    "head_dim": 32,
    "block_size": 8,
    "rope": '{"theta":2}',
}


def test_sizes() -> None:
    assert block_shape(LAYOUT) == (30, 2, 16, 3, 64)
    assert layer_block_bytes(LAYOUT) == 2 * 16 * 3 * 64 * 2 == 12_288
    assert block_bytes(LAYOUT) == 368_640
    assert block_bytes(msgspec.structs.replace(LAYOUT, dtype="float32")) == 737_280


def test_an_unknown_dtype_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="KV dtype is 'int4', must be one of bfloat16, float16, float32"):
        block_bytes(msgspec.structs.replace(LAYOUT, dtype="int4"))


def test_a_fingerprint_is_stable_and_tells_every_field() -> None:
    prints = {fingerprint(LAYOUT)}
    assert fingerprint(msgspec.structs.replace(LAYOUT)) in prints
    # Pinned: it names blocks in stores that outlive a release.
    assert prints == {"cae8cfd0d19d1db3039334b0893cbd48774c25bafdfd690268b82ffa13904d65"}
    for field, value in OTHERS.items():
        prints.add(fingerprint(msgspec.structs.replace(LAYOUT, **{field: value})))
    assert len(prints) == 1 + len(OTHERS)


@pytest.mark.parametrize("field", OTHERS)
def test_a_mismatch_names_the_field_and_both_values(field: str) -> None:
    theirs = msgspec.structs.replace(LAYOUT, **{field: OTHERS[field]})
    with pytest.raises(LayoutMismatch) as e:
        require_same(LAYOUT, theirs)
    assert (e.value.field, e.value.ours, e.value.theirs) == (field, getattr(LAYOUT, field), OTHERS[field])
    assert field in e.value.message
    require_same(LAYOUT, msgspec.structs.replace(LAYOUT))


def test_no_field_is_left_out_of_these_tests() -> None:
    assert set(KVLayout.__struct_fields__) - set(OTHERS) == {"byte_order"}  # it has one value
