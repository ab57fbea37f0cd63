"""The C structures of source/model.h, field by field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_int64, c_void_p

LAYER_WEIGHTS = (
    "input_norm", "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o", "post_norm",
    "gate", "up", "down",
)  # fmt: skip


class Layer(Structure):
    _fields_ = [*((name, c_void_p) for name in LAYER_WEIGHTS), ("window", c_int64)]


class Model(Structure):
    _fields_ = [
        *(
            (name, c_int64)
            for name in (
                "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
            )
        ),
        ("norm_eps", c_double),
        ("scale", c_double),
        ("layers", POINTER(Layer)),
        *((name, c_void_p) for name in ("embedding", "final_norm", "cos", "sin")),
    ]  # fmt: skip


class Pool(Structure):
    _fields_ = [
        ("data", c_void_p),
        *((name, c_int64) for name in ("block_stride", "layer_stride", "side_stride", "block_size")),
    ]


class Batch(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "alone", "num_chunks")),
        *(
            (name, c_void_p)
            for name in (
                "token_ids", "positions", "slot_blocks", "slot_offsets", "tables", "table_starts", "chunk_sizes",
                "hidden",
            )
        ),
    ]  # fmt: skip
