"""What the bytes of a KV block mean, in plain arithmetic over messages.KVLayout.

A full block is `[num_layers, 2, block_size, num_kv_heads, head_dim]`, contiguous, little-endian, keys before values.
Its slice for one layer is the layer block. A pool is `[num_blocks, *block_shape]`.
"""

import hashlib
import json

import msgspec

from distserve.errors import ConfigError, LayoutMismatch
from distserve.messages import KVLayout

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number. Raises ConfigError for a dtype that KV can't have."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        expected = ", ".join(DTYPE_BYTES)
        raise ConfigError(
            f"KV dtype is {dtype!r}, must be one of {expected}", key="dtype", value=dtype, expected=expected
        ) from None


def block_shape(layout: KVLayout) -> tuple[int, int, int, int, int]:
    """[num_layers, 2, block_size, num_kv_heads, head_dim]; index 0 of the second axis is keys, 1 values."""
    return layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim


def layer_block_bytes(layout: KVLayout) -> int:
    """Bytes of one layer's keys and values of one block."""
    return 2 * layout.block_size * layout.num_kv_heads * layout.head_dim * dtype_bytes(layout.dtype)


def block_bytes(layout: KVLayout) -> int:
    """Bytes of one full block."""
    return layout.num_layers * layer_block_bytes(layout)


def fingerprint(layout: KVLayout) -> str:
    """sha256, in hex, of every field in canonical form: equal layouts, and only those, have equal fingerprints."""
    canonical = json.dumps(msgspec.structs.asdict(layout), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def require_same(ours: KVLayout, theirs: KVLayout) -> None:
    """Raises LayoutMismatch that names the first field that differs, with both values."""
    for field in KVLayout.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            raise LayoutMismatch(
                f"KV layouts differ in {field}: ours is {mine!r}, theirs {other!r}; "
                "both sides must load the same model with the same settings",
                field=field,
                ours=mine,
                theirs=other,
            )
