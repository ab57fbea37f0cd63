"""What is put into stores and got back, the same for every one of them. Standard library only: drivers of peers, in
environments of their own, import it too.

A value is a KV block of 16 tokens in bfloat16, sized as models' blocks are. A request is what a worker asks for at
once: a prompt of 64 blocks, or fewer where they are large.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
BLOCK_SIZE = 16  # tokens
DTYPE_BYTES = 2
REQUEST_VALUES = 64
REQUEST_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Size:
    """How large a value is, by the shape of the model."""

    label: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def value_bytes(self) -> int:
        return self.num_layers * 2 * BLOCK_SIZE * self.num_kv_heads * self.head_dim * DTYPE_BYTES


SIZES = {size.label: size for size in (Size("64KiB", 4, 4, 64), Size("1MiB", 16, 8, 128), Size("16MiB", 64, 32, 128))}


@dataclass(frozen=True, slots=True)
class Load:
    """`total_bytes` in values of one size, in requests of as many as go into one."""

    size: Size
    total_bytes: int

    def __post_init__(self) -> None:
        if self.total_bytes % (self.num_a_request * self.size.value_bytes):
            raise ValueError(f"{self.total_bytes} bytes are not whole requests of {self.size.label}: take 64 MiB more")

    @property
    def num_values(self) -> int:
        return self.total_bytes // self.size.value_bytes

    @property
    def num_a_request(self) -> int:
        return min(REQUEST_VALUES, REQUEST_BYTES // self.size.value_bytes)

    def requests(self) -> list[range]:
        """Values of each request."""
        step = self.num_a_request
        return [range(first, first + step) for first in range(0, self.num_values, step)]
